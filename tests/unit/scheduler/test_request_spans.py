"""The scheduler's spans follow from what its core remembers of admissions."""

from __future__ import annotations

import msgspec

from services.scheduler.request_spans import record_admissions
from shared.messages.explanations import Admission, Wait
from shared.messages.requests import SamplingParams
from shared.messages.worker_plans import AdmitRequest, WorkerPlan
from tests.recorded_spans import RecordedSpans
from tests.scripted_cell import scripted_cell

PARENT = f"00-{1:032x}-{2:016x}-01"


def plan(attempt: int = 1, trace: str = PARENT) -> WorkerPlan:
    """The order that admits request ``r``."""
    order = AdmitRequest(
        request_id="r",
        attempt=attempt,
        gateway_id="g",
        tokens=b"\0\0\0\0",
        prompt_tokens=1,
        sampling=SamplingParams(max_tokens=4),
        pages=b"\0\0\0\0",
        trace=trace,
    )
    return WorkerPlan(worker_id="w1", incarnation="i", number=1, epoch=1, cause=1, order=order)


def admission(attempt: int = 1, admitted_ns: int = 900) -> Admission:
    """Accepted at 100, deferred, and waiting for a fetch behind that."""
    return Admission(
        request_id="r",
        attempt=attempt,
        worker_id="w1",
        accepted_ns=100,
        admitted_ns=admitted_ns,
        waits=(
            Wait(kind="deferral", start_ns=200, end_ns=300),
            Wait(kind="prefetch_wait", start_ns=400, end_ns=700),
        ),
    )


def test_waits_lie_within_the_queue() -> None:
    """From acceptance to admission, and below that what the request stood aside for."""
    state, tracer = scripted_cell(1).fold.state, RecordedSpans()
    assert state.recollection is not None
    state.recollection.note_admitted(admission())

    record_admissions(tracer, state, [plan()])

    assert tracer.times == {"queue": (100, 900), "deferral": (200, 300), "prefetch": (400, 700)}
    queue, *waits = tracer.spans
    assert queue.parent == PARENT
    assert {wait.parent for wait in waits} == {queue.traceparent}


def test_a_later_attempt_was_accepted_only_once() -> None:
    """How long it waited after its failure is not known, and nothing is told twice."""
    state, tracer = scripted_cell(1).fold.state, RecordedSpans()
    assert state.recollection is not None
    state.recollection.note_admitted(admission())
    state.recollection.note_admitted(admission(attempt=2, admitted_ns=2000))

    record_admissions(tracer, state, [plan(attempt=2)])

    assert tracer.times == {"queue": (2000, 2000)}


def test_who_is_not_traced_leaves_nothing() -> None:
    """Nor does one of whom nothing is remembered, or another order."""
    state, tracer = scripted_cell(1).fold.state, RecordedSpans()
    record_admissions(tracer, state, [plan()])
    assert state.recollection is not None
    state.recollection.note_admitted(admission())

    record_admissions(tracer, state, [plan(trace=""), plan(attempt=7)])

    assert tracer.spans == []


def test_the_core_hands_the_trace_on_and_decides_nothing_by_it() -> None:
    """Orders are the same but for the field, which no message has on the wire where it is empty."""
    traced, bare = plan(), plan(trace="")

    assert b"trace" not in msgspec.msgpack.encode(bare)
    assert msgspec.structs.replace(traced.order, trace="") == bare.order
