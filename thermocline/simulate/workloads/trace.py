"""A recorded trace in the Mooncake format, streamed: blocks by name, arrival times as recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from thermocline.simulate.tokens import Span
from thermocline.simulate.workloads.asked import OUTPUT, QUESTION, SHARED, Asked, Workload, name
from thermocline.trace.arrival_order import OrderedTrace
from thermocline.trace.format import TraceRequest

_MS_PER_S = 1e3


class TraceWorkload(Workload):
    """A workload from a trace file. Raises InvalidRequest, with the line, when it reaches a malformed one."""

    def __init__(self, path: Path, *, limit: int | None = None, is_timed: bool = True, speed: float = 1.0) -> None:
        """``speed`` divides the recorded times; untimed requests are sent as soon as a place is free."""
        self._trace = OrderedTrace(path, limit)
        self._is_timed = is_timed
        self._speed = speed

    @property
    def warning(self) -> str | None:
        """Sentence about requests that were too far out of order to be sorted, so far; None for none."""
        return self._trace.warning

    def requests(self) -> Iterator[Asked]:
        """Yield the requests of the file in order of time, which begins at 0 with the first.

        Raises InvalidRequest for a malformed line, and for a file that is out of order.
        """
        origin_ms: float | None = None
        for number, request in enumerate(self._trace):
            origin_ms = request.timestamp if origin_ms is None else origin_ms
            yield Asked(
                spans=tuple(spans_of(request, number)),
                answer=Span(name(OUTPUT, number), max(1, request.output_length)),
                time_s=(request.timestamp - origin_ms) / _MS_PER_S / self._speed if self._is_timed else None,
            )


def spans_of(request: TraceRequest, number: int) -> Iterator[Span]:
    """Yield the blocks of a request, the last one cut to its length, then a span of its own for the rest."""
    left = request.input_length
    for hash_id in request.hash_ids:
        if left <= 0:
            return
        yield Span(name(SHARED, hash_id), min(request.block_tokens, left))
        left -= request.block_tokens
    if left > 0:
        yield Span(name(QUESTION, number), left)
