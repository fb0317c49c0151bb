"""Work stealing: a worker with nothing to do takes waiting requests from one that has no time for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.prefix_match import matched_path
from services.scheduler.core.queue.placement import Placement, estimate, fits
from services.scheduler.core.queue.queueing import stand_at, step_away
from services.scheduler.core.rates import backlog_us
from services.scheduler.core.restoring.prefetch import prefetch
from services.scheduler.core.waiting.ready_order import first_in_line
from services.scheduler.core.waiting.transient import tokens_coming

if TYPE_CHECKING:
    from services.scheduler.core.request import Request
    from services.scheduler.core.state import CellState, Worker
    from services.scheduler.core.step import Step

_LOOKED_AT = 16
"""Waiting requests that one theft chooses among; it takes as many at the most."""


def steal(step: Step) -> list[Worker]:
    """Let idle workers take over what gains time there; returns those that have got something to do.

    Ends with the first that finds nothing to take, so that many idle workers cost no more than one. A later turn
    begins with another of them.
    """
    state = step.state
    if not state.queued or len(state.workers) < 2:
        return []
    idle = [worker for worker in state.workers.values() if _is_idle(worker)]
    first = step.seq % len(idle) if idle else 0
    busy = []
    for worker in (*idle[first:], *idle[:first]):
        if not _steal_for(step, worker):
            break
        busy.append(worker)
    return busy


def _is_idle(worker: Worker) -> bool:
    return not (worker.running or worker.batches or worker.queue.size or worker.deferred or worker.drain)


def _steal_for(step: Step, thief: Worker) -> bool:
    """Move requests from the most loaded queue, those first that lose least, as long as each is done earlier."""
    state = step.state
    victim: Worker | None = None
    most = 0.0
    for worker in state.workers.values():
        backlog = backlog_us(state, worker) if worker.queue.size else 0.0
        if backlog > most:
            victim, most = worker, backlog
    if victim is None:
        return False
    taken = 0
    for request, placement in _by_loss(state, victim, thief):
        if placement.cost_us + backlog_us(state, thief) >= backlog_us(state, victim):
            continue
        step_away(state, request)
        stand_at(state, request, placement)
        prefetch(step, request)
        taken += 1
    state.count("requests_stolen", taken)
    return taken > 0


def _by_loss(state: CellState, victim: Worker, thief: Worker) -> list[tuple[Request, Placement]]:
    """The next requests of a queue and what they would cost elsewhere; the least loss first, then in order."""
    found = []
    for name in first_in_line(state, victim, _LOOKED_AT):
        request = state.requests[name]
        if fits(state, request, thief):
            path = matched_path(state, request)
            coming = tokens_coming(state, request).get(thief.worker_id, 0)
            found.append((request, estimate(state, request, thief, path, coming)))
    return sorted(found, key=lambda pair: pair[1].cost_us - pair[0].cost)
