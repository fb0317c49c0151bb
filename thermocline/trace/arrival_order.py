"""Requests in order of time: sorted within a bounded window, so that memory does not grow with a trace or log.

A request that comes later than the window reaches gets the time of the one before, and is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from pathlib import Path
from typing import TypeVar

import msgspec

from shared.errors import InvalidRequest
from thermocline.trace.format import TraceRequest, read_trace

HELD_REQUESTS, HELD_BLOCKS = 4096, 1_000_000
"""Most requests and blocks that are held back for sorting."""

MOST_LATE_SHARE = 0.01
"""Share of late requests above which a trace is refused: its times do not say when its requests came."""


T = TypeVar("T")


def ordered(requests: Iterable[tuple[float, int, T]]) -> Iterator[T]:
    """Yield requests, given as (time, number of blocks, request), sorted by time within the window.

    Equal times stay in their order.
    """
    held: list[tuple[float, int, int, T]] = []
    held_blocks = 0
    for number, (time, blocks, request) in enumerate(requests):
        heappush(held, (time, number, blocks, request))
        held_blocks += blocks
        while len(held) > HELD_REQUESTS or (held_blocks > HELD_BLOCKS and len(held) > 1):
            _, _, gone, first = heappop(held)
            held_blocks -= gone
            yield first
    while held:
        yield heappop(held)[3]


class OrderedTrace:
    """The first ``limit`` requests of a trace file, in order of time. ``late`` counts those beyond the window so far.

    Reading raises InvalidRequest for a malformed line, and for a trace with too many late requests.
    """

    def __init__(self, path: Path, limit: int | None = None) -> None:
        """Read nothing yet."""
        self.late = 0
        self._path = path
        self._limit = limit

    def __iter__(self) -> Iterator[TraceRequest]:
        """Yield the requests; the times of late ones are raised to that of the request before."""
        self.late = 0
        latest: float = 0
        read = read_trace(self._path, self._limit)
        for number, request in enumerate(ordered((each.timestamp, len(each.hash_ids), each) for each in read), 1):
            if request.timestamp < latest:
                self.late += 1
                self._refuse_disorder(number)
                request = msgspec.structs.replace(request, timestamp=latest)
            latest = request.timestamp
            yield request

    def _refuse_disorder(self, read: int) -> None:
        if self.late > MOST_LATE_SHARE * max(read, HELD_REQUESTS):
            raise InvalidRequest(
                f"{self._path} is out of order: {self.late:,} of its first {read:,} requests come more than "
                f"{HELD_REQUESTS:,} lines after later ones, further than simulate, send and `trace import` sort; "
                "sort the file by timestamp"
            )

    @property
    def warning(self) -> str | None:
        """Sentence about the late requests so far; None where there were none."""
        if not self.late:
            return None
        return (
            f"{self._path}: {self.late:,} requests come more than {HELD_REQUESTS:,} lines after later ones, and count "
            "as sent with the one before; `trace import --format mooncake` reports them too, and sorting the file by "
            "timestamp mends it"
        )
