"""What a schedule is: a generator that is asked for one candidate after another while a batch is formed.

Between two candidates the caller admits the one that it got, so the draft has grown when the generator goes on. It
ends when the batch is full or a candidate finds no room: nobody may overtake one that waits for pages. Candidates
come lazily, in the ready order, and those that are deferred never come; looking at one more costs a match.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.scheduler.core.queue.batch_builder import BatchBuilder, Candidate
    from services.scheduler.core.state import CellState, Worker


class Candidates(Protocol):
    """Candidates in the ready order, one at a time; see :class:`look.Look`."""

    def __iter__(self) -> Iterator[Candidate]: ...

    def __next__(self) -> Candidate: ...

    def bundle_hits(self) -> list[Candidate]:
        """Those that come later and stand on what the batch loads now. They do not come again."""


class Schedule(Protocol):
    """Chooses among candidates. Keeps nothing between batches and mutates nothing."""

    def __call__(
        self, state: CellState, worker: Worker, builder: BatchBuilder, candidates: Candidates
    ) -> Iterator[Candidate]: ...
