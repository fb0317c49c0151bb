"""Schedules: the candidates that a batch takes from a scan of the queue, and their order.

Candidates come in the ready order, without requests that are better off waiting. Each is admitted as it comes, or put
aside until the window is through. A batch is done when it is full or a candidate finds no room: no request may
overtake one that waits for pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from services.scheduler.core.queue.batch_builder import BatchBuilder, Candidate
    from services.scheduler.core.state import CellState, Worker


class Schedule:
    """Base of all schedules: first come, first served. Keeps nothing between batches and changes nothing."""

    name = ""
    prefers_bundle_hits = False
    """Whether requests that reuse what the batch has begun to load go before all others (Strata 4.3.2)."""

    def puts_aside(
        self, state: CellState, worker: Worker, builder: BatchBuilder, candidate: Candidate, *, is_first: bool
    ) -> bool:
        """Return whether a candidate is not admitted as it comes. ``is_first``: none was admitted before."""
        return False

    def order(self, put_aside: list[Candidate]) -> list[Candidate]:
        """Return the order in which candidates that were put aside are admitted when the window is through."""
        return put_aside


S = TypeVar("S", bound=type[Schedule])

SCHEDULES: dict[str, Schedule] = {}
"""Schedules by name. Each is registered where it is defined, outside the core, as eviction policies are."""


def register_schedule(schedule: S) -> S:
    """Register a schedule under its class's ``name``; a decorator. Raises ValueError when another has that name."""
    known = SCHEDULES.setdefault(schedule.name, schedule())
    if type(known) is not schedule:
        raise ValueError(f"schedules {type(known).__qualname__} and {schedule.__qualname__} are {schedule.name!r}")
    return schedule
