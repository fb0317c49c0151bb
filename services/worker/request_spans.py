"""The worker's spans of traces, derived from the orders and reports that pass through the event loop.

The compute thread is not involved.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from services.worker.reports import Report
from shared.messages.tokens import Timing, TokenItem, Usage
from shared.messages.worker_plans import AdmitRequest
from shared.tracing import Attributes, Tracer

MOST_TRACED = 8192
"""Most traced requests at once; beyond it the oldest is dropped, whose end can only have been missed."""


@dataclass(slots=True)
class _Traced:
    trace: str
    attempt: int
    timing: Timing | None = None


class RequestSpans:
    """Records the spans of every traced request when it ends here. Owned by the event loop."""

    def __init__(self, tracer: Tracer, clock_ns: Callable[[], int] = time.time_ns) -> None:
        """Record by ``tracer``, which is not closed here; ``clock_ns`` is wall-clock time, as in ``Timing``."""
        self._tracer = tracer
        self._clock_ns = clock_ns
        self._traced: dict[str, _Traced] = {}

    def admitted(self, order: AdmitRequest) -> None:
        """Note an order to admit a request."""
        if not order.trace:
            return
        self._traced.pop(order.request_id, None)
        self._traced[order.request_id] = _Traced(order.trace, order.attempt)
        while len(self._traced) > MOST_TRACED:
            del self._traced[next(iter(self._traced))]

    def reported(self, report: Report) -> None:
        """Note a report that is being sent."""
        if not self._traced:
            return
        for items in report.items.values():
            for item in items:
                self._see(item)
        for request_id in report.preempted:
            self._end(request_id, None)

    def _see(self, item: TokenItem) -> None:
        known = self._traced.get(item.request_id)
        if known is None or known.attempt != item.attempt:
            return
        known.timing = known.timing or item.timing
        if item.finish is not None:
            self._end(item.request_id, item)

    def _end(self, request_id: str, last: TokenItem | None) -> None:
        """Record a request's spans; ``last`` is None where the request goes on elsewhere."""
        known = self._traced.pop(request_id, None)
        if known is None or known.timing is None:
            return  # It ended before its first token.
        at = known.timing
        about: dict[str, str | int] = {"request_id": request_id, "attempt": known.attempt}
        begun_ns = at.started_ns
        if at.loaded_ns:
            self._record("load", known, begun_ns, at.loaded_ns, about)
            begun_ns = max(begun_ns, at.loaded_ns)
        if at.restored_ns:
            self._record("restore", known, begun_ns, at.restored_ns, about)
            begun_ns = max(begun_ns, at.restored_ns)
        usage = last.usage if last is not None and last.usage is not None else Usage()
        # Loads and computing overlap from the first loaded layer on, so their times are not known separately.
        self._record("compute", known, begun_ns, at.first_token_ns, {**about, **_sources(usage)})
        tokens = last.index + len(last.tokens) if last is not None else 0
        reason = last.finish if last is not None and last.finish is not None else "preempted"
        ending: Attributes = about | {"completion_tokens": tokens, "finish_reason": reason}
        self._record("decode", known, at.first_token_ns, self._clock_ns(), ending)

    def _record(self, name: str, known: _Traced, start_ns: int, end_ns: int, attributes: Attributes) -> None:
        if start_ns and end_ns:
            self._tracer.record(name, known.trace, start_ns, end_ns, attributes)


def _sources(usage: Usage) -> dict[str, int]:
    return {
        "device_tokens": usage.device_tokens,
        "host_tokens": usage.host_tokens,
        "disk_tokens": usage.disk_tokens,
        "remote_tokens": usage.remote_tokens,
        "neighbour_tokens": usage.neighbour_tokens,
        "lent_tokens": usage.lent_tokens,
        "hidden_tokens": usage.hidden_tokens,
        "sparse_tokens": usage.sparse_tokens,
        "computed_tokens": usage.computed_tokens,
    }
