"""Many rows per call into a device pool in host memory: no loop over pages in Python.

With a C compiler one call gathers, checks and writes (``native_rows``), without the interpreter lock. Without one,
rows are gathered into a staging buffer, checked there and written by index. Either way the bytes that were verified
are the bytes that are written, so they cannot change in between.
"""

from __future__ import annotations

import numpy as np

from services.worker.kv.device_pool import DevicePool
from services.worker.kv.movers.protocol import Fence, Known, MoverName, nothing_wrong
from services.worker.kv.page_memory import Bools, PageMemory, PageNumbers
from services.worker.kv.row_checks import RowChecks
from services.worker.native.page_rows import can_hash, native_rows

PIECE_BYTES = 4 * 2**20
"""Bytes of one layer moved by one call: below a millisecond, so that a load can be given up in between."""

STAGED_PAGES = 64
"""Rows gathered, verified and written at a time without C code: enough to amortise a call, few enough for the cache."""


class BatchedMover:
    """Satisfies :class:`~services.worker.kv.movers.protocol.PageMover` for pools in host memory."""

    name: MoverName = "batched"

    def __init__(self, pool: DevicePool, *, native: bool = True) -> None:
        """Prepare; with ``native`` False only numpy is used."""
        self._memory = pool.memory()
        self._native = native_rows() if native else None
        half = pool.geometry.half_bytes
        self._can_hash = can_hash(half)
        self.piece_pages = max(1, PIECE_BYTES // (2 * half))
        self._staging = np.empty((STAGED_PAGES, 2, half), dtype=np.uint8)

    def load(
        self,
        source: PageMemory,
        layers: range,
        pages: PageNumbers,
        device_pages: PageNumbers,
        checks: RowChecks | None = None,
    ) -> Known:
        """Copy with one native call, or through staging where there is none or it cannot hash; done when it returns.

        Rows are checked before they are written, so a wrong row is not written.
        """
        if self._native is None or (checks is not None and not self._can_hash):
            return Known(self._load_staged(source, layers, pages, device_pages, checks))
        if checks is not None:
            return Known(self._native.move_checked(source, self._memory, layers, pages, device_pages, checks))
        self._native.move(source, self._memory, layers, pages, device_pages)
        return nothing_wrong(len(pages))

    def store(self, target: PageMemory, layers: range, device_pages: PageNumbers, pages: PageNumbers) -> None:
        """Copy all rows of all layers with one native call, or layer by layer by index."""
        if self._native is not None:
            self._native.move(self._memory, target, layers, device_pages, pages)
            return
        begin, end = self._memory.host_rows(), target.host_rows()
        for layer in layers:
            end[pages, layer] = begin[device_pages, layer]

    def fence(self) -> Fence | None:
        """Return None: every copy is done when its call returns."""
        return None

    def drain(self) -> None:
        """Return at once: no copy is pending."""

    def _load_staged(
        self,
        source: PageMemory,
        layers: range,
        pages: PageNumbers,
        device_pages: PageNumbers,
        checks: RowChecks | None,
    ) -> Bools:
        begin, end = source.host_rows(), self._memory.host_rows()
        wrong = np.zeros(len(pages), dtype=bool)
        for at, layer in enumerate(layers):
            for start in range(0, len(pages), STAGED_PAGES):
                part = slice(start, min(start + STAGED_PAGES, len(pages)))
                rows = self._staging[: part.stop - start]
                rows[...] = begin[pages[part], layer]
                for row in range(len(rows)) if checks is not None else ():
                    index = start + row
                    assert checks is not None
                    wrong[index] = wrong[index] or not checks.holds(rows[row].reshape(-1), index, at)
                good = ~wrong[part]
                end[device_pages[part][good], layer] = rows[good]
        return wrong
