"""The outcome of a step's work, and of the batch that it carried out."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.worker.bubble import Bubble
from services.worker.compute import Computed
from services.worker.kv.loads import LoadResult
from services.worker.reports import BatchFigures
from services.worker.restoring import Restored
from services.worker.sparse_prefixes import LoadedPrefix
from services.worker.steps import Work
from shared.messages.pools import KvGeometry
from shared.messages.worker_events import LoadFailure


@dataclass(slots=True)
class Outcome:
    """Outcome of a step.

    ``lost`` stood on missing pages, ``broken`` raised, the sparse prefix of ``refused`` could not be read, ``rejected``
    (request ids) could not be tried. All work restored before the step is in ``restored``, whatever became of it.
    ``sparse`` prefixes have been loaded as a whole with this step.

    Times in ns: ``took_ns`` is the wall time of the step from the end of the bubble on, stall included.
    """

    done: list[Computed] = field(default_factory=list)
    lost: list[Work] = field(default_factory=list)
    broken: list[tuple[Work, Exception]] = field(default_factory=list)
    refused: list[Work] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)
    sparse: list[LoadedPrefix] = field(default_factory=list)
    loads: LoadResult | None = None
    restored: Restored = field(default_factory=Restored)
    bubble: Bubble = field(default_factory=Bubble)
    took_ns: int = 0
    is_repeated: bool = False  # A pass was thrown away, so times say nothing about the work.

    def keep(self, work: list[Work]) -> None:
        """Keep only this work among what was computed or restored."""
        self.restored.keep(work)
        kept = {id(item) for item in work}
        self.done = [one for one in self.done if id(one.work) in kept]

    @property
    def failed(self) -> list[str]:
        """Requests whose chunk was not computed or restored, or whose load failed; some more than once."""
        failed = [*self.rejected, *(item.request.request_id for item in self.lost)]
        failed += self.sparse_refused
        failed += [*self.restored.rejected, *(item.request.request_id for item in self.restored.failed)]
        failed += [item.request.request_id for item, _ in self.broken if item.is_chunk]
        return failed + (self.loads.failed_requests if self.loads is not None else [])

    @property
    def sparse_refused(self) -> list[str]:
        """Requests whose sparse prefix could not be read."""
        return [item.request.request_id for item in self.refused]

    @property
    def load_failures(self) -> list[LoadFailure]:
        """Failed loads of the batch; empty for a step without loads."""
        return self.loads.failures if self.loads is not None else []

    @property
    def prefill_rows(self) -> int:
        """Prompt tokens that chunks computed."""
        return sum(one.work.rows for one in self.done if one.work.is_chunk)

    @property
    def decode_rows(self) -> int:
        """Rows of decode steps, those of proposals included."""
        return sum(one.work.rows for one in self.done if not one.work.is_chunk)

    @property
    def decoded_tokens(self) -> int:
        """Tokens of answers that decode rows have brought."""
        return sum(len(one.sampled) for one in self.done if not one.work.is_chunk)

    @property
    def proposed_tokens(self) -> int:
        """Proposed tokens that were verified, right or not."""
        return sum(len(one.work.proposed) for one in self.done)

    @property
    def accepted_tokens(self) -> int:
        """Proposed tokens that were right."""
        return sum(one.accepted for one in self.done)

    @property
    def stall_ns(self) -> int:
        """Time spent waiting for loads during the step. Restorations before it have waited too, in their own time."""
        return max(0, self.loads.waited_ns - self.restored.waited_ns) if self.loads is not None else 0

    @property
    def sparse_ns(self) -> int:
        """Time spent waiting for reads of sparse prefixes during the step; computing is not included."""
        return round(sum(loaded.prefix.stall_s for loaded in self.sparse) * 1e9)

    def figures(self, geometry: KvGeometry) -> BatchFigures:
        """Return the batch's figures for ``BatchDone``."""
        figures = BatchFigures(
            compute_us=max(0, self.took_ns - self.sparse_ns) // 1000,
            computed_tokens=self.prefill_rows,
            bubble_us=self.bubble.ns // 1000,
            bubble_tokens=self.bubble.tokens,
            stall_us=self.stall_ns // 1000,
            restored_tokens=self.restored.rows,
            restore_us=self.restored.took_ns // 1000,
        )
        if self.loads is not None:
            figures.load_us = self.loads.load_ns // 1000
            figures.loaded_tokens = self.loads.pages * geometry.page_size
        return figures
