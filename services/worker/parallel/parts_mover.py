"""Moves whole pages into and out of the parts of a group's pool.

A row's checksum covers all heads, so rows are gathered and checked as a whole, once, by rank 0. Then every part gets
its heads, by a mover of its own: the bytes that were verified are the bytes that are divided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.worker.kv.device_pool import DevicePool
from services.worker.kv.host_checks import gather_checked
from services.worker.kv.movers.protocol import Fence, Known, MoverName, PageMover
from services.worker.kv.page_memory import Bools, PageLayout, PageMemory, PageNumbers
from services.worker.kv.row_checks import RowChecks
from shared.errors import TransportError
from shared.messages.pools import KvGeometry

PIECE_BYTES = 4 * 2**20
"""Bytes of one layer that are staged at a time; a load can be given up in between."""


class _Staging:
    """Rows of one layer at a time: uint8 [pages, 2, half_bytes], which as a memory are the rows of every layer."""

    def __init__(self, geometry: KvGeometry, pages: int) -> None:
        half = geometry.half_bytes
        self.rows: npt.NDArray[np.uint8] = np.empty((pages, 2, half), dtype=np.uint8)
        self._shape = (geometry.page_size, geometry.kv_heads, geometry.head_bytes)
        layout = PageLayout(pages, geometry.layers, half, page_stride=2 * half, layer_stride=0, half_stride=half)
        self.memory = PageMemory(layout, array=self.rows.reshape(-1))

    def heads(self, count: int) -> npt.NDArray[np.uint8]:
        """Return the first ``count`` rows as [count, 2, page_size, kv_heads, head_bytes]."""
        return self.rows[:count].reshape(count, 2, *self._shape)


@dataclass(frozen=True, slots=True)
class _Part:
    heads: slice
    mover: PageMover
    staging: _Staging
    is_first: bool  # No part before it has these heads.


@dataclass(frozen=True, slots=True)
class _AllFences:
    fences: Sequence[Fence]

    def synchronize(self) -> None:
        for fence in self.fences:
            fence.synchronize()


class PartsMover:
    """Satisfies :class:`~services.worker.kv.movers.protocol.PageMover` for the pool of a group."""

    name: MoverName = "batched"

    def __init__(
        self,
        geometry: KvGeometry,
        parts: Sequence[tuple[range, DevicePool]],
        make: Callable[[DevicePool], PageMover],
    ) -> None:
        """``geometry`` is that of whole pages, ``make`` makes the mover of one part."""
        self.piece_pages = max(1, PIECE_BYTES // (2 * geometry.half_bytes))
        self._staging = _Staging(geometry, self.piece_pages)
        self._parts = [
            _Part(
                slice(heads.start, heads.stop),
                make(pool),
                _Staging(pool.geometry, self.piece_pages),
                is_first=not any(heads.start in earlier for earlier, _ in parts[:index]),
            )
            for index, (heads, pool) in enumerate(parts)
        ]

    def load(
        self,
        source: PageMemory,
        layers: range,
        pages: PageNumbers,
        device_pages: PageNumbers,
        checks: RowChecks | None = None,
    ) -> Known:
        """See :class:`PageMover`. Pages on another worker's GPU come through host memory, and have no checksums."""
        wrong = np.zeros(len(pages), dtype=bool)
        for at, layer in enumerate(layers):
            for piece in self._pieces(len(pages)):
                of_piece = None if checks is None else checks.part(piece, slice(at, at + 1))
                good = self._gather(source, layer, pages[piece], of_piece)
                wrong[piece] |= ~good
                self._spread(layer, device_pages[piece], good)
        return Known(wrong)

    def store(self, target: PageMemory, layers: range, device_pages: PageNumbers, pages: PageNumbers) -> None:
        rows = target.host_rows()
        for layer in layers:
            for piece in self._pieces(len(pages)):
                count = piece.stop - piece.start
                whole, places = self._staging.heads(count), np.arange(count, dtype=np.int32)
                for part in self._parts:
                    if part.is_first:
                        part.mover.store(part.staging.memory, range(layer, layer + 1), device_pages[piece], places)
                        whole[:, :, :, part.heads] = part.staging.heads(count)
                rows[pages[piece], layer] = self._staging.rows[:count]

    def fence(self) -> Fence | None:
        fences = [fence for fence in (part.mover.fence() for part in self._parts) if fence is not None]
        return _AllFences(fences) if fences else None

    def drain(self) -> None:
        for part in self._parts:
            part.mover.drain()

    def _gather(self, source: PageMemory, layer: int, pages: PageNumbers, checks: RowChecks | None) -> Bools:
        """Stage whole rows; which of them are good."""
        if source.array is not None:
            return gather_checked(source, self._staging.memory, layer, pages, checks)
        if checks is not None:
            raise TransportError("rows on a GPU are verified where they are, and a group's are not in one piece")
        rows = source.device_bytes()
        held = rows[torch.from_numpy(pages.astype(np.int64)).to(rows.device), layer]
        self._staging.rows[: len(pages)] = held.cpu().numpy()
        return np.ones(len(pages), dtype=bool)

    def _pieces(self, count: int) -> Iterator[slice]:
        for start in range(0, count, self.piece_pages):
            yield slice(start, min(start + self.piece_pages, count))

    def _spread(self, layer: int, device_pages: PageNumbers, good: Bools) -> None:
        """Give every part its heads of the staged rows that are good."""
        kept = np.flatnonzero(good)
        if not len(kept):
            return
        whole, places = self._staging.heads(len(good)), np.arange(len(kept), dtype=np.int32)
        for part in self._parts:
            part.staging.heads(len(kept))[...] = whole[kept, :, :, part.heads]
            part.mover.load(part.staging.memory, range(layer, layer + 1), places, device_pages[kept])
