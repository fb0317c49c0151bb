"""Read every chunk of the disks and check it. A bad one is quarantined: it is never served, and is computed again."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field

from services.gateway.cache_calls import CacheCalls
from shared.broker import add_broker_flags, broker_of
from shared.errors import NotFound
from shared.progress_line import Bar
from shared.sizes import size
from thermocline.cache import argument_types
from thermocline.cache.connection import watched

SUMMARY = "read every chunk of the disks and check it"
CHUNKS_A_CALL = 256


@dataclass(slots=True)
class Report:
    """The result for one storage's disk; ``bad`` describes each bad chunk."""

    storage: str
    checked: int = 0
    nbytes: int = 0
    bad: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Return the totals on one line."""
        return f"{self.storage}: {self.checked:,} chunks checked, {size(self.nbytes)}, {len(self.bad):,} bad"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this verb."""
    add_broker_flags(parser)
    parser.add_argument("--storage", metavar="ID", type=argument_types.name, help="only this storage's disk")


async def run(arguments: argparse.Namespace) -> bool:
    """Check the disks and print a report; return False when a chunk was bad. Raises NotFound for an unknown storage."""
    async with watched(broker_of(arguments)) as (calls, bar):
        storages = sorted((await calls.status()).storages)
        if arguments.storage is not None:
            if arguments.storage not in storages:
                raise NotFound(f"there is no storage {arguments.storage!r}; there are: {', '.join(storages) or 'none'}")
            storages = [arguments.storage]
        reports = [await scrubbed(calls, storage, bar) for storage in storages]
    is_good = not any(report.bad for report in reports)
    if arguments.json:
        fields = [
            {"storage": report.storage, "checked": report.checked, "bytes": report.nbytes, "bad": report.bad}
            for report in reports
        ]
        print(json.dumps({"storages": fields, "ok": is_good}))
    else:
        print("\n".join(report_lines(reports)))
    return is_good


async def scrubbed(calls: CacheCalls, storage: str, bar: Bar) -> Report:
    """Check the whole disk of one storage, CHUNKS_A_CALL chunks per call."""
    report, after = Report(storage), ""
    while True:
        found = await calls.scrub(storage, after=after, max_chunks=CHUNKS_A_CALL)
        report.checked += found.checked
        report.nbytes += found.nbytes
        report.bad += found.bad
        bar.say(str(report))
        after = found.next_after
        if not after:
            return report


def report_lines(reports: list[Report]) -> list[str]:
    """Return a line for each storage, and one for each bad chunk."""
    if not reports:
        return ["the cell has no storage"]
    lines = []
    for report in reports:
        lines += [str(report), *(f"  bad: {what}" for what in report.bad)]
    return lines
