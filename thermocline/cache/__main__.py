"""``thermocline cache stat`` and ``thermocline cache flush``."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from uuid import uuid4

import msgspec

from shared import subjects
from shared.bus.nats_bus import connect
from shared.bus.protocol import Bus
from shared.codec import decode, encode
from shared.config import add_nats_flag
from shared.errors import ThermoclineError
from shared.messages.cell_events import FlushCache
from shared.messages.status import CellStatus, GetStatus

EXIT_OK, EXIT_FAILED = 0, 1
TIERS = ("device", "host")
PATIENCE_S = 10.0


async def stat(urls: Sequence[str]) -> CellStatus:
    """What the scheduler says of its pools. Raises Unavailable when none answers."""
    bus = await connect(urls, "cache", timeout_s=PATIENCE_S)
    try:
        return await _status(bus)
    finally:
        await bus.close()


async def flush(urls: Sequence[str], tiers: tuple[str, ...], namespace: str) -> CellStatus:
    """Drop every cached page that nothing uses; returns the status after that.

    Raises Unavailable when no broker or scheduler answers in time. What running requests use stays.
    """
    bus = await connect(urls, "cache", timeout_s=PATIENCE_S)
    try:
        call_id = uuid4().hex
        order = FlushCache(call_id=call_id, tiers=tiers, namespace=namespace)
        seq = await bus.append(subjects.cell_input(), encode(order), message_id=call_id)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                status = await _status(bus)
                if status.seq >= seq:
                    return status
                await asyncio.sleep(0.05)
    finally:
        await bus.close()


async def _status(bus: Bus) -> CellStatus:
    return decode(await bus.call(subjects.rpc("scheduler", "status"), encode(GetStatus())), CellStatus)


def table(status: CellStatus) -> str:
    """One line per pool, then the counters that speak of the cache."""
    lines = [f"{'pool':<24} {'tier':<8} {'pages':>10} {'cached':>10} {'leased':>10} {'free':>10}"]
    for pool in status.pools:
        row = f"{pool.total:>10} {pool.cached:>10} {pool.leased:>10} {pool.free:>10}"
        lines.append(f"{pool.owner:<24} {pool.tier:<8} {row}")
    lines.append(f"{status.nodes} nodes, pages of {status.page_size} tokens")
    wanted = ("hit_tokens", "evicted", "flushed", "promot", "host_", "quarantined", "deferred")
    for name, value in sorted(status.counters.items()):
        if any(part in name for part in wanted):
            lines.append(f"{name:<40} {value:>14}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: done; 1: the cell cannot be reached; 2: bad arguments."""
    common = argparse.ArgumentParser(add_help=False)
    add_nats_flag(common)
    common.add_argument("--json", action="store_true", help="print the cell's status as one JSON object")
    parser = argparse.ArgumentParser(prog="thermocline cache", description="The prefix cache of a running cell.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("stat", parents=[common], help="show the pools and what the cache has done")
    emptying = verbs.add_parser("flush", parents=[common], help="drop every cached page that nothing uses")
    emptying.add_argument("--tier", choices=TIERS, action="append", help="only this tier; may be given twice")
    emptying.add_argument("--namespace", default="", help="only this namespace (32 hex digits); all without it")
    parsed = parser.parse_args(list(sys.argv[1:] if argv is None else argv))
    try:
        if parsed.verb == "stat":
            status = asyncio.run(stat(parsed.nats))
        else:
            status = asyncio.run(flush(parsed.nats, tuple(parsed.tier or TIERS), parsed.namespace))
    except (ThermoclineError, TimeoutError) as error:
        reason = error.message if isinstance(error, ThermoclineError) else "the scheduler does not answer"
        print(f"thermocline cache: {reason}", file=sys.stderr)
        return EXIT_FAILED
    print(json.dumps(msgspec.to_builtins(status)) if parsed.json else table(status))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
