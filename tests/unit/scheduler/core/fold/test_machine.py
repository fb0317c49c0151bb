"""The fold itself."""

import typing
from typing import Any

import pytest

from services.scheduler.core import Stamped, check_invariants, encode_state, new_state, pending_timers, step
from services.scheduler.core.fold.machine import HANDLERS
from services.scheduler.core.step import CancelTimer, SetTimer
from shared import codec
from shared.messages.cell_events import SchedulerStarted, TimerFired, WorkerLost
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
