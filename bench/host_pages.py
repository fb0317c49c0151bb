"""KV in pages of a host pool, loaded by a mover and verified where there are checks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.worker.kv.movers.protocol import Fence, PageMover
from services.worker.kv.page_memory import PageMemory, PageNumbers
from services.worker.kv.row_checks import RowChecks
from services.worker.restore.refusals import PiecesRefused


@dataclass(frozen=True, slots=True, eq=False)
class HostPages:
    """A ``KvSource`` over whole pages of a host pool.

    ``checksums`` uint64 [pages, layers] and ``identities`` uint8 [pages, 16] are those that the storage wrote beside
    these pages; without them nothing is checked.
    """

    mover: PageMover
    memory: PageMemory
    pages: PageNumbers
    device_pages: PageNumbers
    checksums: npt.NDArray[np.uint64] | None = None
    identities: npt.NDArray[np.uint8] | None = None

    def load(self, layer: int) -> None:
        for start in range(0, len(self.pages), self.mover.piece_pages):
            part = slice(start, start + self.mover.piece_pages)
            checks = None
            if self.checksums is not None and self.identities is not None:
                wanted = np.ones(len(self.pages[part]), dtype=bool)
                checks = RowChecks(self.checksums[part, layer].reshape(-1, 1), self.identities[part], wanted)
            layers = range(layer, layer + 1)
            wrong = self.mover.load(self.memory, layers, self.pages[part], self.device_pages[part], checks).wrong()
            if wrong.any():
                raise PiecesRefused(f"layer {layer} of host page {self.pages[part][wrong][0]} is not what was saved")

    def fence(self) -> Fence | None:
        return self.mover.fence()

    def drain(self) -> None:
        self.mover.drain()
