"""Handlers of timers that are due."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.adapters import end_grace
from services.scheduler.core.cache.eviction_orders import go_on_renewing
from services.scheduler.core.cache.leasing import expire_cache_lease
from services.scheduler.core.cache.pins import expire_pin
from services.scheduler.core.fold.configure import go_on_flushing
from services.scheduler.core.hidden.hidden_leases import expire_lease
from services.scheduler.core.hidden.hidden_saves import expire_hidden_save
from services.scheduler.core.members.draining import expire_drain
from services.scheduler.core.members.handover import end_pause, expire_node_drain
from services.scheduler.core.members.membership import strike_more
from services.scheduler.core.queue.completion import end_early
from services.scheduler.core.queue.queueing import fail
from services.scheduler.core.restoring.fetch_waits import expire_fetch_wait
from services.scheduler.core.restoring.fetches import expire_fetch, hidden_fetch_expired
from services.scheduler.core.tiers.backups import expire_backup
from services.scheduler.core.tiers.loads import end_late_reads
from services.scheduler.core.tiers.saves import expire_save
from services.scheduler.core.waiting.waits import expire_deferral
from shared.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.scheduler.core.step import Step, Timer, TimerKind


def timer_fired(step: Step, timer_id: str) -> None:
    """Do what the timer was set for; one that was cancelled meanwhile counts as a stale input."""
    timer = step.state.timers.pop(timer_id, None)
    if timer is None:
        step.state.count("stale_inputs")
        return
    _HANDLERS[timer.kind](step, timer)


def _deadline(step: Step, timer: Timer) -> None:
    request = step.state.requests[timer.subject]
    request.deadline_timer = ""
    end_early(step, request, "deadline")


def _deferral(step: Step, timer: Timer) -> None:
    request = step.state.requests[timer.subject]
    step.touch(request.worker_id)
    expire_deferral(step, request)


def _prefetch(step: Step, timer: Timer) -> None:
    request = step.state.requests[timer.subject]
    step.touch(request.worker_id)
    expire_fetch_wait(step, request)


def _resume(step: Step, timer: Timer) -> None:
    request = step.state.requests[timer.subject]
    fail(step, request, Unavailable.code, "the gateway did not say from where to resume")


def _backup(step: Step, timer: Timer) -> None:
    transfer = step.state.transfers[int(timer.subject)]
    step.touch(transfer.worker_id)
    expire_backup(step, transfer)


def _save(step: Step, timer: Timer) -> None:
    save = step.state.saves.get(int(timer.subject))
    if save is not None:
        expire_save(step, save)
    else:
        expire_hidden_save(step, step.state.hidden_saves[int(timer.subject)])


def _drain(step: Step, timer: Timer) -> None:
    step.touch(timer.subject)
    expire_drain(step, step.state.workers[timer.subject])


_HANDLERS: dict[TimerKind, Callable[[Step, Timer], None]] = {
    "deadline": _deadline,
    "deferral": _deferral,
    "prefetch": _prefetch,
    "fetch": lambda step, timer: expire_fetch(step, step.state.fetches[int(timer.subject)]),
    "hidden_fetch": lambda step, timer: hidden_fetch_expired(step, step.state.hidden_fetches[int(timer.subject)]),
    "resume": _resume,
    "backup": _backup,
    "pin": lambda step, timer: expire_pin(step, step.state.pins[timer.subject]),
    "cache_lease": lambda step, timer: expire_cache_lease(step, step.state.cache_leases.leases[int(timer.subject)]),
    "save": _save,
    "hidden_lease": lambda step, timer: expire_lease(step, step.state.leases[int(timer.subject)]),
    "reads": lambda step, timer: end_late_reads(step, timer.subject),
    "drain": _drain,
    "strike": lambda step, timer: strike_more(step),
    "flush": lambda step, timer: go_on_flushing(step),
    "renew": lambda step, timer: go_on_renewing(step),
    "hand_over": lambda step, timer: expire_node_drain(step, step.state.storages[timer.subject]),
    "hand_again": lambda step, timer: end_pause(step.state.handing[timer.subject]),
    "adapter": lambda step, timer: end_grace(step, step.state.adapters[timer.subject]),
}
