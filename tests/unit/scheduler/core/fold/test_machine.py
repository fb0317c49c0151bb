"""The fold itself."""

import typing
from typing import Any

import pytest

from services.scheduler.core import Stamped, check_invariants, encode_state, new_state, pending_timers, step
from services.scheduler.core.fold.machine import HANDLERS
from services.scheduler.core.state import MOST_QUARANTINED
from services.scheduler.core.step import CancelTimer, SetTimer
from shared import codec
from shared.messages.cell_events import InputFailed, InputSkipped, SchedulerStarted, SkipInput, TimerFired, WorkerLost
from shared.messages.gateway_notices import GatewayNotice, RequestFailed
from shared.messages.requests import CancelRequest, ResumeRequest
from shared.messages.storage_events import BackupDone, HostPoolCreated, StorageLeft
from shared.messages.worker_events import BatchDone, LeaseRequested, RequestFinished, RequestPreempted, WorkerLeft
from tests.unit.scheduler.core.cell_fixtures import MakeCell

WORKER: dict[str, Any] = {"worker_id": "nobody", "incarnation": "x"}
RUN: dict[str, Any] = {**WORKER, "request_id": "nothing", "attempt": 1}
STORAGE: dict[str, Any] = {"storage_id": "nobody", "incarnation": "x"}

STRANGERS = [
    CancelRequest(request_id="nothing", gateway_id="nobody"),
    ResumeRequest(request_id="nothing", gateway_id="nobody", attempt=1),
    WorkerLeft(**WORKER),
    BatchDone(**WORKER, plan=1),
    LeaseRequested(**RUN, generated=1),
    RequestFinished(**RUN, reason="stop", output=b""),
    RequestPreempted(**RUN, output=b""),
    StorageLeft(**STORAGE),
    HostPoolCreated(**STORAGE, handle=None),
    BackupDone(**STORAGE, transfer_id=1, ok=True),
    TimerFired(timer_id="nothing"),
    WorkerLost(**WORKER),
]


def test_every_input_has_a_handler() -> None:
    """Whatever the codec decodes, the machine takes; timers have a table of their own."""
    assert [*HANDLERS, TimerFired] == [
        *(kind for kind in typing.get_args(codec.Input) if kind is not TimerFired),
        TimerFired,
    ]


@pytest.mark.parametrize("message", STRANGERS, ids=lambda message: type(message).__name__)
def test_messages_about_strangers_are_counted_and_ignored(message: Any) -> None:
    """Stale input never raises and never speaks."""
    state = new_state()

    assert step(state, Stamped(1, 1, message)) == []
    assert state.counters == {"stale_inputs": 1}
    check_invariants(state)


def test_an_input_is_folded_once() -> None:
    """A sequence number that was seen is ignored; gaps are fine."""
    state = new_state()
    step(state, Stamped(5, 1, SchedulerStarted(scheduler_id="a", epoch=3)))

    assert step(state, Stamped(5, 1, SchedulerStarted(scheduler_id="b", epoch=9))) == []
    assert (state.last_seq, state.epoch) == (5, 3)


def test_the_epoch_never_falls() -> None:
    """An older scheduler's start does not unfence."""
    state = new_state()
    step(state, Stamped(1, 1, SchedulerStarted(scheduler_id="a", epoch=3)))
    step(state, Stamped(2, 1, SchedulerStarted(scheduler_id="b", epoch=2)))

    assert state.epoch == 3


def test_outputs_carry_epoch_and_cause(make_cell: MakeCell) -> None:
    """Every plan names the scheduler's epoch and the input that led to it."""
    cell = make_cell()
    cell.feed(SchedulerStarted(scheduler_id="a", epoch=7))
    cell.submit([1, 2, 3])

    plans = [output for output in cell.outputs[-1] if not isinstance(output, SetTimer | CancelTimer)]
    assert [(plan.epoch, plan.cause) for plan in plans] == [(7, cell.seq)] * 2


def test_pending_timers_are_known_after_recovery(make_cell: MakeCell) -> None:
    """A shell that restarts can set them again."""
    cell = make_cell(workers=0)
    cell.submit([1, 2, 3], deadline_ms=10)

    (timer,) = pending_timers(cell.state)

    assert {timer.timer_id: timer.at_ns} == cell.timers
    assert encode_state(cell.state)


def skipped(seq: int = 3, **concerned: str) -> InputSkipped:
    """The decision to leave an input out."""
    return InputSkipped(seq=seq, subject="tc.in.cell", kind="SomeInput", reason="KeyError()", **concerned)


def test_the_gateway_of_a_request_that_was_left_out_is_told(make_cell: MakeCell) -> None:
    """It would wait for ever. One that runs, because an earlier copy was accepted, is left alone."""
    cell = make_cell()
    runs = cell.submit([1] * 40, max_tokens=4)

    outputs = cell.feed(skipped(gateway_id="gateway-9", request_id="lost"))
    nothing = cell.feed(skipped(seq=4, gateway_id="gateway-9", request_id=runs))

    word = RequestFailed(
        request_id="lost", code="internal_error", message="the scheduler could not process this request"
    )
    (notice,) = outputs
    assert isinstance(notice, GatewayNotice)
    assert (notice.gateway_id, notice.word) == ("gateway-9", word)
    assert nothing == []
    assert cell.state.counters["inputs_quarantined"] == 2
    assert [(seq, each.kind, each.reason) for seq, each in cell.state.quarantined.items()] == [
        (3, "SomeInput", "KeyError()"),
        (4, "SomeInput", "KeyError()"),
    ]


@pytest.mark.parametrize("is_current", [True, False])
def test_the_member_whose_report_was_left_out_is_given_up(make_cell: MakeCell, is_current: bool) -> None:
    """What the state says of it may be wrong from then on; a later incarnation of it has nothing to do with that."""
    cell = make_cell(host_pages=60)
    worker = next(iter(cell.state.workers.values()))
    storage = next(iter(cell.state.storages.values()))

    for seq, name, member in ((3, worker.worker_id, worker), (4, storage.storage_id, storage)):
        kind = "worker_id" if member is worker else "storage_id"
        incarnation = member.incarnation if is_current else "another"
        cell.feed(skipped(seq=seq, incarnation=incarnation, **{kind: name}))

    assert (len(cell.state.workers), len(cell.state.storages)) == ((0, 0) if is_current else (1, 1))
    check_invariants(cell.state)


def test_a_timer_whose_firing_was_left_out_never_fires_again(make_cell: MakeCell) -> None:
    """It is still set, and every scheduler that starts would let it fire."""
    cell = make_cell()
    cell.submit([1] * 40, max_tokens=4, deadline_ms=1000)
    (timer_id,) = cell.state.timers

    cell.feed(skipped(timer_id=timer_id))

    assert pending_timers(cell.state) == []


def test_a_decision_counts_once_and_the_last_ones_are_remembered() -> None:
    """A repeat is stale; the list is bounded."""
    state = new_state()

    for seq in range(1, MOST_QUARANTINED + 3):
        step(state, Stamped(100 + seq, 1, skipped(seq)))
    step(state, Stamped(300, 1, skipped(seq)))

    assert list(state.quarantined) == list(range(3, MOST_QUARANTINED + 3))
    assert state.counters == {"inputs_quarantined": MOST_QUARANTINED + 2, "stale_inputs": 1}


def test_failures_and_orders_are_counted_and_decide_nothing() -> None:
    """The shell decides, and says so by another input."""
    state = new_state()

    assert step(state, Stamped(2, 1, InputFailed(seq=1, scheduler_id="s", error=""))) == []
    assert step(state, Stamped(3, 1, SkipInput(seq=1, reason=""))) == []

    assert state.counters == {"inputs_failed": 1, "skips_ordered": 1}
