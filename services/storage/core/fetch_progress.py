"""How far a fetch is: its contiguous good chunks, where they came from, and when that is worth an event."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from services.storage.backends import ChunkKey

Source = Literal["disk", "remote", "lender"]

REPORTS = 8
"""Events on the way that one fetch sends at the most, besides the last."""


@dataclass(slots=True)
class FetchProgress:
    """Of a fetch of ``total`` chunks; chunks are counted in order, so ``chunks`` is always a prefix."""

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
        """Chunks that may arrive together, so that none waits for another to be told."""
        return max(1, self._step - (self.chunks - self._reported))

    @property
    def _step(self) -> int:
        return -(-self.total // (REPORTS + 1))

    def arrived(self, source: Source, nbytes: int) -> bool:
        """Count the next chunk in host memory. True if that should be reported now: each eighth of the whole, not the
        end.
        """
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
