"""Longest prefix match first, as SGLang orders its queue (Zheng et al., 2024). A baseline; it can starve.

Priorities still go first. All of the window is scanned before anything is admitted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.queue.schedules import Schedule, register_schedule

if TYPE_CHECKING:
    from services.scheduler.core.queue.batch_builder import BatchBuilder, Candidate
    from services.scheduler.core.state import CellState, Worker


@register_schedule
class LongestPrefix(Schedule):
    """By priority, then by the part of the prompt that is cached on device or host; equals in the ready order."""

    name = "lpm"

    def puts_aside(
        self, state: CellState, worker: Worker, builder: BatchBuilder, candidate: Candidate, *, is_first: bool
    ) -> bool:
        """Return True: every candidate waits until the window is through, to be sorted."""
        return True

    def order(self, put_aside: list[Candidate]) -> list[Candidate]:
        """Return the candidates by priority, then by cached pages, most first; the sort is stable."""
        return sorted(put_aside, key=lambda one: (-one.request.submit.priority, -one.found.pages))
