"""What must hold of workers on their way out, checked from scratch. For tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.require import require
from services.scheduler.core.waiting.fair_share import waiting_at

if TYPE_CHECKING:
    from services.scheduler.core.state import CellState, Worker


def check_drain(state: CellState, worker: Worker) -> None:
    """Raise InvariantViolated if a worker that drains is expected to do anything new, or could stay for ever."""
    drain, name = worker.drain, worker.worker_id
    if drain is None:
        return
    require(not any(True for _ in waiting_at(worker)), f"{name} drains and requests wait for it")
    require(not worker.load_waiters and not worker.queued_cost, f"{name} drains and somebody counts on it")
    require(drain.is_over or drain.timer_id in state.timers, f"{name} drains without an end")
    require(not drain.is_over or not drain.nodes, f"{name} may leave and has something to hand over")
    for other in state.workers.values():
        is_asked = other.neighbours.get(name, False)
        require(not (drain.is_over and is_asked), f"{other.worker_id} would still read from {name}")
