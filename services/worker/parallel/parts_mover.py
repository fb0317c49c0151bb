"""A mover of whole pages into and out of the parts of a group's pool.

A row's checksum covers all heads, so rows are gathered and checked as a whole, once, by rank 0. Then every part gets
its share of them: the bytes that were verified are the bytes that are divided. Heads go by a mover of the part's own,
spans, which are in host memory, by plain copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from services.worker.kv.device_pool import DevicePool
from services.worker.kv.host_checks import gather_checked
from services.worker.kv.movers.protocol import Fence, Known, MoverName, PageMover
from services.worker.kv.page_memory import Bools, PageLayout, PageMemory, PageNumbers
from services.worker.kv.row_checks import RowChecks
from services.worker.parallel.group_pool import PartOfPool
from shared.errors import TransportError
from shared.memory.part_spans import of_plane, whole_bytes
from shared.messages.pools import KvGeometry, PartSpan

PIECE_BYTES = 4 * 2**20
"""Bytes of one layer that are staged at a time; a load can be given up in between."""


class _Staging:
    """Rows of one layer at a time: uint8 [pages, 2, half_bytes], which serve as the rows of every layer."""

    def __init__(self, geometry: KvGeometry, pages: int) -> None:
        half = geometry.half_bytes
        self.rows: npt.NDArray[np.uint8] = np.empty((pages, 2, half), dtype=np.uint8)
        self.page_size = geometry.page_size
        self._shape = (geometry.page_size, geometry.kv_heads, geometry.head_bytes)
        layout = PageLayout(pages, geometry.layers, half, page_stride=2 * half, layer_stride=0, half_stride=half)
        self.memory = PageMemory(layout, array=self.rows.reshape(-1))

    def heads(self, count: int) -> npt.NDArray[np.uint8]:
        """Return the first ``count`` rows as [count, 2, page_size, kv_heads, head_bytes]."""
        return self.rows[:count].reshape(count, 2, *self._shape)


class _Part(Protocol):
    """One rank's part, which gets and returns rows of a layer: uint8 [pages, 2, half_bytes] of whole pages."""

    mover: PageMover | None

    def put(self, layer: int, rows: npt.NDArray[np.uint8], device_pages: PageNumbers) -> None:
        """Write the part's share of ``rows`` into ``device_pages``."""

    def take(self, layer: int, device_pages: PageNumbers, rows: npt.NDArray[np.uint8]) -> None:
        """Copy into ``rows`` the bytes that this part has and no part before it."""


class _HeadsPart:
    """A part with some heads of every layer."""

    def __init__(self, heads: range, pool: DevicePool, mover: PageMover, pages: int, *, is_first: bool) -> None:
        """``is_first``: no part before it has these heads."""
        self.mover: PageMover | None = mover
        self._mover, self._heads, self._is_first = mover, slice(heads.start, heads.stop), is_first
        self._staging = _Staging(pool.geometry, pages)
        self._head_bytes = pool.geometry.head_bytes

    def put(self, layer: int, rows: npt.NDArray[np.uint8], device_pages: PageNumbers) -> None:
        self._staging.heads(len(rows))[...] = self._of(rows)
        places = np.arange(len(rows), dtype=np.int32)
        self._mover.load(self._staging.memory, range(layer, layer + 1), places, device_pages)

    def take(self, layer: int, device_pages: PageNumbers, rows: npt.NDArray[np.uint8]) -> None:
        if self._is_first:
            places = np.arange(len(rows), dtype=np.int32)
            self._mover.store(self._staging.memory, range(layer, layer + 1), device_pages, places)
            self._of(rows)[...] = self._staging.heads(len(rows))

    def _of(self, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        page_size = self._staging.page_size
        return rows.reshape(len(rows), 2, page_size, -1, self._head_bytes)[:, :, :, self._heads]


class _SpansPart:
    """A part with the bytes of its spans, in shared memory."""

    mover: PageMover | None = None

    def __init__(self, pool: DevicePool, spans: Sequence[PartSpan], read: Sequence[PartSpan], layers: int) -> None:
        """``spans`` are all of the part's, ``read`` those that no part before it has; of whole pages of ``layers``."""
        geometry = pool.geometry
        self._planes = pool.bytes_view().reshape(2 * geometry.layers, pool.pages, geometry.half_bytes)
        halves = [[(2 * layer + half, half) for half in (0, 1)] for layer in range(layers)]
        self._spans, self._read = (
            [[span for plane, half in both for span in of_plane(some, plane, half)] for both in halves]
            for some in (spans, read)
        )

    def put(self, layer: int, rows: npt.NDArray[np.uint8], device_pages: PageNumbers) -> None:
        for span in self._spans[layer]:
            self._rows(span)[device_pages, :, _own(span)] = whole_bytes(rows, span)[:, 0]

    def take(self, layer: int, device_pages: PageNumbers, rows: npt.NDArray[np.uint8]) -> None:
        for span in self._read[layer]:
            whole_bytes(rows, span)[:, 0] = self._rows(span)[device_pages, :, _own(span)]

    def _rows(self, span: PartSpan) -> npt.NDArray[np.uint8]:
        """Return the span's plane in all pages, as its rows."""
        plane = self._planes[span.own_first]
        return plane.reshape(len(plane), span.rows, -1)


def _own(span: PartSpan) -> slice:
    return slice(span.own_offset, span.own_offset + span.nbytes)


@dataclass(frozen=True, slots=True)
class _AllFences:
    fences: Sequence[Fence]

    def synchronize(self) -> None:
        for fence in self.fences:
            fence.synchronize()


class PartsMover:
    """The :class:`~services.worker.kv.movers.protocol.PageMover` of a group's pool."""

    name: MoverName = "batched"

    def __init__(
        self, geometry: KvGeometry, parts: Sequence[PartOfPool], make: Callable[[DevicePool], PageMover]
    ) -> None:
        """``geometry`` is that of whole pages, ``make`` makes the mover of one part."""
        self.piece_pages = max(1, PIECE_BYTES // (2 * geometry.half_bytes))
        self._staging = _Staging(geometry, self.piece_pages)
        self._parts: list[_Part] = []
        for part in parts:
            if part.heads is None:
                self._parts.append(_SpansPart(part.pool, part.spans, part.read_spans, geometry.layers))
            else:
                mover, is_first = make(part.pool), bool(part.read_spans)
                self._parts.append(_HeadsPart(part.heads, part.pool, mover, self.piece_pages, is_first=is_first))

    def load(
        self,
        source: PageMemory,
        layers: range,
        pages: PageNumbers,
        device_pages: PageNumbers,
        checks: RowChecks | None = None,
    ) -> Known:
        """Gather and check rows as a whole, then copy each part's share; see :class:`PageMover`.

        Pages on another worker's GPU come through host memory, and have no checksums.
        """
        wrong = np.zeros(len(pages), dtype=bool)
        for at, layer in enumerate(layers):
            for piece in self._pieces(len(pages)):
                of_piece = None if checks is None else checks.part(piece, slice(at, at + 1))
                good = self._gather(source, layer, pages[piece], of_piece)
                wrong[piece] |= ~good
                self._spread(layer, device_pages[piece], good)
        return Known(wrong)

    def store(self, target: PageMemory, layers: range, device_pages: PageNumbers, pages: PageNumbers) -> None:
        """Collect each page's rows from all parts, and write them to host memory; bytes that no part has are zero."""
        rows = target.host_rows()
        for layer in layers:
            for piece in self._pieces(len(pages)):
                whole = self._staging.rows[: piece.stop - piece.start]
                whole[...] = 0  # For bytes that no part has.
                for part in self._parts:
                    part.take(layer, device_pages[piece], whole)
                rows[pages[piece], layer] = whole

    def fence(self) -> Fence | None:
        """Return the fences of all parts' movers as one; None when all loads are complete."""
        fences = [fence for fence in (mover.fence() for mover in self._movers()) if fence is not None]
        return _AllFences(fences) if fences else None

    def drain(self) -> None:
        """Return when no part's mover is writing any more."""
        for mover in self._movers():
            mover.drain()

    def _movers(self) -> list[PageMover]:
        return [part.mover for part in self._parts if part.mover is not None]

    def _gather(self, source: PageMemory, layer: int, pages: PageNumbers, checks: RowChecks | None) -> Bools:
        """Stage whole rows, and return which of them are good, bool [pages]."""
        if source.array is not None:
            return gather_checked(source, self._staging.memory, layer, pages, checks)
        if checks is not None:
            raise TransportError("rows on a GPU are verified in place, and a group's rows are in parts")
        rows = source.device_bytes()
        held = rows[torch.from_numpy(pages.astype(np.int64)).to(rows.device), layer]
        self._staging.rows[: len(pages)] = held.cpu().numpy()
        return np.ones(len(pages), dtype=bool)

    def _pieces(self, count: int) -> Iterator[slice]:
        for start in range(0, count, self.piece_pages):
            yield slice(start, min(start + self.piece_pages, count))

    def _spread(self, layer: int, device_pages: PageNumbers, good: Bools) -> None:
        """Give every part its bytes of the staged rows that are good."""
        kept = np.flatnonzero(good)
        if not len(kept):
            return
        rows = self._staging.rows[: len(good)]
        rows = rows if len(kept) == len(good) else rows[kept]
        for part in self._parts:
            part.put(layer, rows, device_pages[kept])
