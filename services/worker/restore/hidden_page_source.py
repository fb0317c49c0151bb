"""Reads of hidden pages in the storage's pool: hidden states and KV, unit by unit, each verified as it is read.

A unit is a contiguous piece of a page with a checksum of its own (``KvGeometry``), so one layer can be read and
verified alone, in the order in which restoration wants layers (HCache section 4.2.1). The bytes that were verified are
the bytes that are used: they are hashed where they cannot be changed any more. The pages are leased, so they should not
be written; a last check in the end finds pages that were reused nevertheless (:meth:`HiddenPages.confirm`).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from services.worker.kv.device_pool import DevicePool
from services.worker.kv.movers.protocol import Fence
from services.worker.kv.movers.side_stream import side_stream
from services.worker.kv.page_memory import PageLayout, PageMemory, PageNumbers, Rows
from services.worker.kv.row_checks import RowChecks
from services.worker.native.page_rows import can_hash, native_rows
from services.worker.restore.pinned_turns import PinnedTurns
from services.worker.restore.refusals import PiecesRefused
from shared.memory import HostPoolView
from shared.messages.pools import KvGeometry, PoolHandle


class HiddenPages:
    """Pages of a mapped hidden pool that hold the hidden states of consecutive tokens."""

    def __init__(self, view: HostPoolView, pages: PageNumbers, identities: Rows) -> None:
        """Prepare ``pages``, int32 [n], and the ``identities`` that they should have, uint8 [n, 16].

        Raises PiecesRefused for pages that are not in the pool or hold something else.
        """
        if not len(pages) or pages.min() < 0 or pages.max() >= view.handle.pages:
            raise PiecesRefused(f"there is a hidden page outside the pool of {view.handle.pages} pages")
        if identities.shape != (len(pages), view.identities.shape[1]):
            raise PiecesRefused(f"{len(pages)} hidden pages and {len(identities)} identities")
        self._view, self._pages, self._identities = view, pages, identities
        self.confirm()

    def __len__(self) -> int:
        """Return the number of pages."""
        return len(self._pages)

    @property
    def geometry(self) -> KvGeometry:
        """Geometry of hidden pages."""
        return self._view.geometry

    @property
    def handle(self) -> PoolHandle:
        """Handle by which another process maps the pool of these pages."""
        return self._view.handle

    @property
    def numbers(self) -> PageNumbers:
        """Page numbers in the pool, int32 [n]."""
        return self._pages

    @property
    def identities(self) -> Rows:
        """Identities that the pages should have, uint8 [n, 16]."""
        return self._identities

    def kv_units(self, layer: int) -> tuple[int, int]:
        """Return the units of a layer's K and V. Raises PiecesRefused for a layer without KV in the pages."""
        first = self.geometry.layers - self.geometry.loaded_layers
        if layer < first:
            raise PiecesRefused(f"these hidden pages do not hold KV of layer {layer}")
        unit = self.geometry.from_hidden + 2 * (layer - first)
        return unit, unit + 1

    def part(self, start: int, end: int) -> HiddenPages:
        """Return pages ``[start, end)`` of these."""
        return HiddenPages(self._view, self._pages[start:end], self._identities[start:end])

    def confirm(self) -> None:
        """Raise PiecesRefused if a page no longer holds what it should."""
        wrong = (self._view.identities[self._pages] != self._identities).any(axis=1)
        if wrong.any():
            raise PiecesRefused(f"hidden page {self._pages[wrong][0]} holds something else than the plan says")

    def copy(self, unit: int, part: slice, target: PageMemory, rows: PageNumbers) -> None:
        """Copy ``unit`` of the pages in ``part`` to these ``rows`` of ``target``, which has units for rows.

        Raises PiecesRefused for one that fails verification; it is not written.
        """
        pages = self._pages[part]
        expected = self._view.checksums[pages, unit].reshape(-1, 1)
        checks = RowChecks(expected, self._identities[part], np.ones(len(pages), dtype=bool))
        size = self.geometry.unit_bytes
        source = unit_memory(
            self._view.flat_pages()[unit * size :], self._view.handle.pages, size, self.geometry.page_bytes
        )
        native = native_rows()
        if native is not None and can_hash(source.layout.half_bytes):
            wrong = native.move_checked(source, target, range(1), pages, rows, checks)
        else:
            wrong = _copy_checked(source, target, pages, rows, checks)
        if wrong.any():
            raise PiecesRefused(f"unit {unit} of hidden page {pages[wrong][0]} is not what was saved")


class HiddenOfPages:
    """A :class:`~services.worker.restore.hidden_source.HiddenSource` over hidden pages."""

    def __init__(self, pages: HiddenPages, turns: PinnedTurns | None = None) -> None:
        """Prepare; ``turns`` is for a GPU, whose memory no unit can be verified into."""
        self.tokens = len(pages) * pages.geometry.page_size
        self._pages, self._turns = pages, turns

    def read(self, layer: int, start: int, end: int, into: torch.Tensor) -> None:
        """Read one layer's hidden states; see the protocol.

        Also raises PiecesRefused for a layer without hidden states in the pages.
        """
        geometry = self._pages.geometry
        unit, size = layer - geometry.absent, geometry.page_size
        if not 0 <= unit < geometry.from_hidden or into.shape[1] != geometry.hidden:
            raise PiecesRefused(f"these hidden pages hold no hidden states of {into.shape[1]} values in layer {layer}")
        first, last = start // size, -(-end // size)
        if start % size or end % size:
            whole = into.new_empty((last - first) * size, into.shape[1])
            self._read_pages(unit, first, last, whole)
            into.copy_(whole[start - first * size : end - first * size])
        else:
            self._read_pages(unit, first, last, into)

    def _read_pages(self, unit: int, first: int, last: int, into: torch.Tensor) -> None:
        """Read a unit of pages ``[first, last)`` to ``into``, contiguous [(last - first) * page_size, hidden]."""
        size = self._pages.geometry.unit_bytes
        rows = into.view(-1).view(torch.uint8).view(last - first, size)
        if self._turns is None:
            target = unit_memory(rows.numpy().reshape(-1), len(rows), size, size)
            self._pages.copy(unit, slice(first, last), target, np.arange(len(rows), dtype=np.int32))
            return
        for part, pinned in _in_turns(self._pages, unit, range(first, last), self._turns):
            rows[part.start - first : part.stop - first].copy_(pinned, non_blocking=True)


class KvOfPages:
    """A :class:`~services.worker.restore.kv_source.KvSource` over hidden pages: K and V of whole pages."""

    def __init__(
        self, pages: HiddenPages, pool: DevicePool, device_pages: PageNumbers, turns: PinnedTurns | None = None
    ) -> None:
        """Prepare; ``device_pages`` int32 [n], distinct, inside ``pool``. ``turns`` as for :class:`HiddenOfPages`."""
        self._pages, self._pool, self._device_pages, self._turns = pages, pool, device_pages, turns
        self._stream = side_stream(pool.device)
        self._index = torch.from_numpy(device_pages.astype(np.int64)).to(pool.device)

    def load(self, layer: int) -> None:
        """Load one layer's KV; see the protocol. Also raises PiecesRefused for a layer without KV in the pages."""
        geometry = self._pages.geometry
        for half, unit in enumerate(self._pages.kv_units(layer)):
            if self._turns is None:
                rows = self._pool.bytes_view()[layer, half].reshape(-1)
                target = unit_memory(rows, self._pool.pages, geometry.unit_bytes, geometry.unit_bytes)
                self._pages.copy(unit, slice(0, len(self._pages)), target, self._device_pages)
            else:
                self._load_through(self._turns, unit, self._pool.v(layer) if half else self._pool.k(layer))

    def fence(self) -> Fence | None:
        """Return an event behind all loads so far; None in host memory."""
        return self._stream.fence()

    def drain(self) -> None:
        """Wait until no load is writing to the pool."""
        self._stream.drain()

    def _load_through(self, turns: PinnedTurns, unit: int, into: torch.Tensor) -> None:
        """Load a unit to ``into``, K or V of one layer, [pages, page_size, kv_heads, head_dim], by way of ``turns``."""
        with self._stream:
            for part, pinned in _in_turns(self._pages, unit, range(len(self._pages)), turns):
                rows = pinned.to(into.device, non_blocking=True)
                into.index_copy_(0, self._index[part], rows.view(into.dtype).view(-1, *into.shape[1:]))


def unit_memory(data: Rows, pages: int, unit_bytes: int, page_stride: int) -> PageMemory:
    """Return one unit of each of ``pages`` pages as movers see memory: a row of two adjacent halves.

    ``data`` (flat) begins with the first page's unit.
    """
    half = unit_bytes // 2
    return PageMemory(PageLayout(pages, 1, half, page_stride, 0, half), array=data)


def _in_turns(pages: HiddenPages, unit: int, wanted: range, turns: PinnedTurns) -> Iterator[tuple[slice, torch.Tensor]]:
    """Gather ``unit`` of the ``wanted`` pages into pinned memory, part by part; yield the part and uint8 [pages, unit].

    Work that the caller launches on the current stream with a part is done before its memory is written again.
    """
    size = pages.geometry.unit_bytes
    step = max(1, turns.nbytes // size)
    for start in range(wanted.start, wanted.stop, step):
        part = slice(start, min(start + step, wanted.stop))
        count = part.stop - part.start
        with turns.next(count * size) as pinned:
            target = unit_memory(pinned.numpy(), count, size, size)
            pages.copy(unit, part, target, np.arange(count, dtype=np.int32))
            yield part, pinned.view(count, size)


def _copy_checked(
    source: PageMemory, target: PageMemory, pages: PageNumbers, rows: PageNumbers, checks: RowChecks
) -> np.ndarray:
    """Copy each row, then hash the copy, without C code; return the wrong pages, bool [pages]."""
    begin, end = source.host_rows(), target.host_rows()
    wrong = np.zeros(len(pages), dtype=bool)
    for index, (page, row) in enumerate(zip(pages.tolist(), rows.tolist(), strict=True)):
        held = begin[page, 0].copy()
        if checks.holds(held.reshape(-1), index, 0):
            end[row, 0] = held
        else:
            wrong[index] = True
    return wrong
