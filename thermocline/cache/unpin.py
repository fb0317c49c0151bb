"""Release a pin before it expires."""

from __future__ import annotations

import argparse
import json

from shared.broker import add_broker_flags, broker_of
from thermocline.cache import argument_types, gateway_client
from thermocline.cache.connection import cell

SUMMARY = "release a pin before it expires"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this verb."""
    add_broker_flags(parser)
    parser.add_argument(
        "name", metavar="NAME", type=argument_types.name, help="name of the pin, as `ls --pins` lists it"
    )
    gateway_client.add_gateway(parser, "unpin")


async def run(arguments: argparse.Namespace) -> bool:
    """Remove the pin, and wait until the scheduler or gateway confirms it."""
    if arguments.url:
        headers = gateway_client.admin_headers(arguments.url, arguments.admin_key)
        async with gateway_client.client(arguments.url, headers) as http:
            await gateway_client.delete(http, f"/v1/cache/pins/{arguments.name}")
    else:
        async with cell(broker_of(arguments)) as calls:
            await calls.unpin(arguments.name)
    if arguments.json:
        print(json.dumps({"name": arguments.name, "deleted": True}))
    else:
        print(f"pin {arguments.name} is gone; what it held may be evicted")
    return True
