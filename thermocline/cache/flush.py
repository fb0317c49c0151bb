"""Drop cached KV that no request uses from some tiers."""

from __future__ import annotations

import argparse
import json

import msgspec

from services.gateway.cache_calls import TIERS, Flushed
from services.gateway.views.cache_view import stats_view
from shared.broker import add_broker_flags, broker_of
from shared.errors import OperatorError
from thermocline.cache import argument_types
from thermocline.cache.connection import cell, namespace_of

SUMMARY = "drop cached KV that no request uses"
BY_DEFAULT = ("device", "host")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this verb."""
    add_broker_flags(parser)
    parser.add_argument(
        "--tier",
        choices=TIERS,
        action="append",
        help="only this tier; may be given several times (default: device and host)",
    )
    parser.add_argument(
        "--namespace", metavar="ID", type=argument_types.namespace, help="only this namespace (32 hex digits)"
    )
    parser.add_argument("--salt", default="", metavar="TEXT", help="only the namespace of this cache_salt")


async def run(arguments: argparse.Namespace) -> bool:
    """Flush, and print what was dropped. Raises Unavailable while the namespace of ``--salt`` is not known."""
    if arguments.namespace and arguments.salt:
        raise OperatorError("give either --namespace or --salt")
    tiers = tuple(dict.fromkeys(arguments.tier or BY_DEFAULT))
    async with cell(broker_of(arguments)) as calls:
        namespace = arguments.namespace or ""
        if arguments.salt:
            namespace = await namespace_of(calls, arguments.salt)
        flushed = await calls.flush(tiers, namespace)
    if arguments.json:
        report = msgspec.to_builtins(stats_view(flushed.status, {}))
        dropped = {name: getattr(flushed, name) for name in ("device_pages", "host_pages", "disk_chunks")}
        print(json.dumps({"tiers": tiers, "dropped": dropped, "pools": report["pools"], "chunks": report["chunks"]}))
    else:
        print("\n".join(flush_lines(flushed, tiers)))
    return True


def flush_lines(flushed: Flushed, tiers: tuple[str, ...]) -> list[str]:
    """Return one line per tier: what was dropped, and what stays because it is in use."""
    lines = []
    for tier, dropped in (("device", flushed.device_pages), ("host", flushed.host_pages)):
        if tier in tiers:
            stays = sum(pool.cached for pool in flushed.status.pools if pool.tier == tier)
            lines.append(f"{tier}: dropped {dropped:,} pages, {stays:,} cached pages stay")
    if "disk" in tiers:
        lines.append(f"disk: dropped {flushed.disk_chunks:,} chunks, {flushed.status.chunks_in_all:,} stay")
    if "remote" in tiers:
        lines.append("remote: object stores are emptied in the background; the storages' logs say when that is done")
    return lines
