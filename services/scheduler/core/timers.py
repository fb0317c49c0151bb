"""Timers that came due."""

from __future__ import annotations

from services.scheduler.core.backups import expire_backup
from services.scheduler.core.cancellation import end_early
from services.scheduler.core.deferral import expire_deferral
from services.scheduler.core.draining import expire_drain
from services.scheduler.core.fetch_waits import expire_fetch_wait
from services.scheduler.core.fetches import expire_fetch
from services.scheduler.core.neighbours import end_late_reads
from services.scheduler.core.pins import expire_pin
from services.scheduler.core.queueing import fail
from services.scheduler.core.saves import expire_save
from services.scheduler.core.state import Timer, count
from services.scheduler.core.state_fetches import expire_state_fetch
from services.scheduler.core.state_leases import expire_lease
from services.scheduler.core.state_saves import expire_state_save
from services.scheduler.core.turn import Turn
from shared.errors import Unavailable


def timer_fired(turn: Turn, timer_id: str) -> None:
    """Do what the timer was set for, unless that is over already."""
    timer = turn.state.timers.pop(timer_id, None)
    if timer is None:
        count(turn.state, "stale_inputs")
        return
    _HANDLERS[timer.kind](turn, timer)


def _deadline(turn: Turn, timer: Timer) -> None:
    request = turn.state.requests[timer.subject]
    request.deadline_timer = ""
    end_early(turn, request, "deadline")


def _deferral(turn: Turn, timer: Timer) -> None:
    request = turn.state.requests[timer.subject]
    turn.touch(request.worker_id)
    expire_deferral(turn, request)


def _prefetch(turn: Turn, timer: Timer) -> None:
    request = turn.state.requests[timer.subject]
    turn.touch(request.worker_id)
    expire_fetch_wait(turn, request)


def _fetch(turn: Turn, timer: Timer) -> None:
    expire_fetch(turn, turn.state.fetches[int(timer.subject)])


def _state_fetch(turn: Turn, timer: Timer) -> None:
    expire_state_fetch(turn, turn.state.state_fetches[int(timer.subject)])


def _resume(turn: Turn, timer: Timer) -> None:
    request = turn.state.requests[timer.subject]
    request.resume_timer = ""
    fail(turn, request, Unavailable.code, "the gateway did not say from where to resume")


def _backup(turn: Turn, timer: Timer) -> None:
    transfer = turn.state.transfers[int(timer.subject)]
    turn.touch(transfer.worker_id)
    expire_backup(turn, transfer)


def _save(turn: Turn, timer: Timer) -> None:
    save = turn.state.saves.get(int(timer.subject))
    if save is not None:
        expire_save(turn, save)
    else:
        expire_state_save(turn, turn.state.state_saves[int(timer.subject)])


def _lease(turn: Turn, timer: Timer) -> None:
    expire_lease(turn, turn.state.leases[int(timer.subject)])


def _pin(turn: Turn, timer: Timer) -> None:
    expire_pin(turn, turn.state.pins[timer.subject])


def _reads(turn: Turn, timer: Timer) -> None:
    end_late_reads(turn, timer.subject)


def _drain(turn: Turn, timer: Timer) -> None:
    turn.touch(timer.subject)
    expire_drain(turn, turn.state.workers[timer.subject])


_HANDLERS = {
    "deadline": _deadline,
    "deferral": _deferral,
    "prefetch": _prefetch,
    "fetch": _fetch,
    "state_fetch": _state_fetch,
    "resume": _resume,
    "backup": _backup,
    "pin": _pin,
    "save": _save,
    "lease": _lease,
    "reads": _reads,
    "drain": _drain,
}
