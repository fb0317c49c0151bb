"""The progress of a fetch: its contiguous good chunks, where they came from, and when to report it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from services.storage.backends import ChunkKey
from shared.chunks import chunks_of_part

Source = Literal["disk", "remote", "lender"]


@dataclass(slots=True)
class FetchProgress:
    """Progress of a fetch of ``total`` chunks; chunks are counted in order, so ``chunks`` is always a prefix."""

    total: int
    chunks: int = 0
    disk_chunks: int = 0
    remote_chunks: int = 0
    lent_chunks: int = 0
    nbytes: int = 0
    missing: list[ChunkKey] = field(default_factory=list)
    _reported: int = 0

    @property
    def until_report(self) -> int:
        """Chunks that may arrive together without delaying the next report."""
        return max(1, self._step - (self.chunks - self._reported))

    @property
    def _step(self) -> int:
        return chunks_of_part(self.total)

    def arrived(self, source: Source, nbytes: int) -> bool:
        """Count the next chunk in host memory; return whether to report: at the end of each part but the last."""
        self.chunks += 1
        self.nbytes += nbytes
        if source == "disk":
            self.disk_chunks += 1
        elif source == "remote":
            self.remote_chunks += 1
        else:
            self.lent_chunks += 1
        is_due = self.chunks - self._reported >= self._step and self.chunks < self.total
        if is_due:
            self._reported = self.chunks
        return is_due
