"""What must hold of workers on their way out, checked from scratch. For tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.waiting.ready_order import waiting_at
from shared.errors import InvariantViolated

if TYPE_CHECKING:
    from services.scheduler.core.state import CellState, Worker


def check_drain(state: CellState, worker: Worker) -> None:
    """Raise InvariantViolated if a worker that drains is expected to do anything new, or could stay for ever."""
    drain, name = worker.drain, worker.worker_id
    if drain is None:
        return
    _require(not any(True for _ in waiting_at(worker)), f"{name} drains and requests wait for it")
    _require(not worker.load_waiters and not worker.queued_cost, f"{name} drains and somebody counts on it")
    _require(drain.is_over or drain.timer_id in state.timers, f"{name} drains without an end")
    _require(not drain.is_over or not drain.nodes, f"{name} may leave and has something to hand over")
    for other in state.workers.values():
        is_asked = other.neighbours.get(name, False)
        _require(not (drain.is_over and is_asked), f"{other.worker_id} would still read from {name}")


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise InvariantViolated(text)
