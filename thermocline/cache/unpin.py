"""Let go of a pin before its time."""

from __future__ import annotations

import argparse
import json

from shared.broker import add_broker_flags, broker_of
from thermocline.cache import argument_types, gateway_client
from thermocline.cache.connection import cell

SUMMARY = "let go of a pin before its time"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this verb."""
    add_broker_flags(parser)
    parser.add_argument("name", type=argument_types.name, help="name of the pin; `ls --pins` lists them")
    parser.add_argument("--base-url", metavar="URL", help="through this gateway, under its admin key")
    gateway_client.add_key(
        parser, "--admin-key", "ADMIN_KEY", "the gateway's --admin-key, where `thermocline up` made none"
    )


async def run(arguments: argparse.Namespace) -> bool:
    """Unpin, and wait until it is so."""
    if arguments.base_url:
        headers = gateway_client.admin_headers(arguments.base_url, arguments.admin_key)
        async with gateway_client.client(arguments.base_url, headers) as http:
            await gateway_client.delete(http, f"/v1/cache/pins/{arguments.name}")
    else:
        async with cell(broker_of(arguments)) as calls:
            await calls.unpin(arguments.name)
    if arguments.json:
        print(json.dumps({"name": arguments.name, "deleted": True}))
    else:
        print(f"pin {arguments.name} is gone; what it held may be evicted")
    return True
