"""First come, first served: the ready order as it is. A baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.queue.schedules import register_schedule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.scheduler.core.queue.batch_builder import BatchBuilder, Candidate
    from services.scheduler.core.queue.schedules import Candidates
    from services.scheduler.core.state import CellState, Worker


@register_schedule("fcfs")
def fcfs(state: CellState, worker: Worker, builder: BatchBuilder, candidates: Candidates) -> Iterator[Candidate]:
    """Every candidate in turn."""
    yield from candidates
