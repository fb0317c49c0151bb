"""A recorded trace in the Mooncake format, streamed: 512-token blocks by name, arrival times as recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from thermocline.simulate.tokens import Span
from thermocline.simulate.workloads.asked import OUTPUT, QUESTION, SHARED, Asked, Workload, name
from thermocline.trace.format import BLOCK_TOKENS, TraceRequest, read_trace

_MS_PER_S = 1e3


class TraceWorkload(Workload):
    """A workload from a trace file. Raises InvalidRequest, with the line, when it reaches a malformed one."""

    def __init__(self, path: Path, *, limit: int | None = None, is_timed: bool = True, speed: float = 1.0) -> None:
        """``speed`` divides the recorded times; untimed requests are sent as soon as a place is free."""
        self._path = path
        self._limit = limit
        self._is_timed = is_timed
        self._speed = speed

    def requests(self) -> Iterator[Asked]:
        """Yield the requests of the file, whose times never decrease. Raises InvalidRequest for a malformed line."""
        latest_s = 0.0
        for number, request in enumerate(read_trace(self._path, self._limit)):
            # A trace may be out of order by a little; time never goes back.
            latest_s = max(latest_s, request.timestamp / _MS_PER_S / self._speed)
            yield Asked(
                spans=tuple(spans_of(request, number)),
                answer=Span(name(OUTPUT, number), max(1, request.output_length)),
                time_s=latest_s if self._is_timed else None,
            )


def spans_of(request: TraceRequest, number: int) -> Iterator[Span]:
    """Yield the blocks of a request, the last one cut to its length, then a span of its own for the rest."""
    left = request.input_length
    for hash_id in request.hash_ids:
        if left <= 0:
            return
        yield Span(name(SHARED, hash_id), min(BLOCK_TOKENS, left))
        left -= BLOCK_TOKENS
    if left > 0:
        yield Span(name(QUESTION, number), left)
