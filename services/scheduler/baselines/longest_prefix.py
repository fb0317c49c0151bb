"""Longest prefix match first, as SGLang orders its queue (Zheng et al., 2024). A baseline; it can starve.

Priorities still go first. All of the window is looked at before anything is admitted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.queue.schedules import register_schedule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.scheduler.core.queue.batch_builder import BatchBuilder, Candidate
    from services.scheduler.core.queue.schedules import Candidates
    from services.scheduler.core.state import CellState, Worker


@register_schedule("lpm")
def longest_prefix(
    state: CellState, worker: Worker, builder: BatchBuilder, candidates: Candidates
) -> Iterator[Candidate]:
    """By priority, then by how much of the prompt is cached on device or host; equals in the ready order."""
    yield from sorted(candidates, key=lambda candidate: (-candidate.request.submit.priority, -candidate.found.pages))
