"""The scheduler's spans of traces: how long a request waited until it was admitted, and for what."""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler.core.state import CellState
from shared.codec import Published
from shared.messages.explanations import Admission
from shared.messages.worker_plans import AdmitRequest, WorkerPlan
from shared.tracing import Tracer

_NAMES = {"deferral": "deferral", "prefetch_wait": "prefetch"}


def record_admissions(tracer: Tracer, state: CellState, published: Iterable[Published]) -> None:
    """Record the waits of traced requests that one input admitted, from what the core remembers of them."""
    memory = state.recollection
    if memory is None:
        return
    for output in published:
        if isinstance(output, WorkerPlan) and isinstance(output.order, AdmitRequest) and output.order.trace:
            order = output.order
            remembered = memory.admissions.get(order.request_id, [])
            found = next((one for one in remembered if one.attempt == order.attempt), None)
            if found is not None:
                # The wait of an attempt after a failure is not known: the caller's request was accepted once.
                is_first = found is remembered[0]
                _record(tracer, order.trace, found, found.accepted_ns if is_first else found.admitted_ns)


def _record(tracer: Tracer, trace: str, admission: Admission, start_ns: int) -> None:
    about: dict[str, str | int] = {
        "request_id": admission.request_id,
        "attempt": admission.attempt,
        "worker": admission.worker_id,
    }
    queue = tracer.record("queue", trace, start_ns, admission.admitted_ns, about)
    for wait in admission.waits:
        if wait.start_ns >= start_ns:
            tracer.record(_NAMES[wait.kind], queue, wait.start_ns, wait.end_ns, about)
