"""Many rows per copy into a device pool on a GPU: gathered into pinned memory, one DMA, scattered by one kernel.

The copy engine needs transfers of a megabyte or more to come near the link's bandwidth (Strata section 3.1), and pages
are far smaller. Two staging buffers take turns: the processor gathers and verifies the next rows, in several threads,
while the last ones cross the link.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from services.worker.kv.device_pool import DevicePool
from services.worker.kv.host_checks import gather_checked
from services.worker.kv.movers.piece_slots import numbers_on
from services.worker.kv.movers.protocol import Fence, Known, MoverName
from services.worker.kv.movers.side_stream import CudaSideStream
from services.worker.kv.page_memory import Bools, PageLayout, PageMemory, PageNumbers
from services.worker.kv.row_checks import RowChecks

STAGING_BYTES = 4 * 2**20


class _Slot:
    """One staging buffer: pinned rows, pinned page numbers and room for the rows on the device."""

    def __init__(self, rows: int, half_bytes: int, device: torch.device) -> None:
        self.pinned = torch.empty((rows, 2, half_bytes), dtype=torch.uint8, pin_memory=True)
        self.index = torch.empty(rows, dtype=torch.int64, pin_memory=True)
        self.on_device = torch.empty((rows, 2, half_bytes), dtype=torch.uint8, device=device)
        self.index_on_device = torch.empty(rows, dtype=torch.int64, device=device)
        # The staging buffer as page memory: row r is page r of one layer.
        layout = PageLayout(rows, 1, half_bytes, 2 * half_bytes, 0, half_bytes)
        self.memory = PageMemory(layout, array=self.pinned.numpy().reshape(-1))
        self.is_free: Fence | None = None

    def wait(self) -> None:
        """Return when the last copy out of the pinned rows has ended."""
        if self.is_free is not None:
            self.is_free.synchronize()
            self.is_free = None


class BatchedCudaMover:
    """Satisfies :class:`~services.worker.kv.movers.protocol.PageMover` for pools on a GPU."""

    name: MoverName = "batched"

    def __init__(self, pool: DevicePool) -> None:
        """Allocate two staging buffers of ``STAGING_BYTES`` each, pinned, and two on the GPU of ``pool``.

        A buffer holds at least one page's K and V of one layer.
        """
        self._memory = pool.memory()
        half = pool.geometry.half_bytes
        self.piece_pages = max(1, STAGING_BYTES // (2 * half))
        self._stream = CudaSideStream(pool.device)
        self._slots = [_Slot(self.piece_pages, half, pool.device) for _ in range(2)]
        self._turn = 0

    def load(
        self,
        source: PageMemory,
        layers: range,
        pages: PageNumbers,
        device_pages: PageNumbers,
        checks: RowChecks | None = None,
    ) -> Known:
        """Gather and check rows in pinned memory, launch their copies, and return the verdict, known already.

        A neighbour's pool on a GPU is copied on the devices instead, unchecked.
        """
        wrong = np.zeros(len(pages), dtype=bool)
        if source.tensor is not None:
            with self._stream:
                copy_on_devices(source, self._memory, layers, pages, device_pages)
            return Known(wrong)
        for at, layer in enumerate(layers):
            for part in self._parts(len(pages)):
                slot = self._next_slot()
                of_part = None if checks is None else checks.part(part, slice(at, at + 1))
                kept = gather_checked(source, slot.memory, layer, pages[part], of_part)
                wrong[part] |= ~kept
                self._send(slot, layer, device_pages[part], kept)
        return Known(wrong)

    def store(self, target: PageMemory, layers: range, device_pages: PageNumbers, pages: PageNumbers) -> None:
        """Gather rows on the GPU, copy each part to pinned memory and from there to ``target``; waits for each part."""
        rows = target.host_rows()
        for layer in layers:
            for part in self._parts(len(pages)):
                slot = self._next_slot()
                count = part.stop - part.start
                slot.index[:count] = torch.from_numpy(device_pages[part].astype(np.int64))
                with self._stream:
                    index = slot.index[:count].to(slot.on_device.device, non_blocking=True)
                    gathered = self._memory.device_rows()[:, layer].index_select(0, index)
                    slot.pinned[:count].copy_(gathered.view(torch.uint8).view(count, 2, -1), non_blocking=True)
                self._stream.drain()
                rows[pages[part], layer] = slot.pinned[:count].numpy()

    def fence(self) -> Fence | None:
        """Return an event behind the copies launched so far."""
        return self._stream.fence()

    def drain(self) -> None:
        """Wait for the mover's stream."""
        self._stream.drain()

    def _parts(self, count: int) -> Iterator[slice]:
        for start in range(0, count, self.piece_pages):
            yield slice(start, min(start + self.piece_pages, count))

    def _next_slot(self) -> _Slot:
        self._turn = 1 - self._turn
        slot = self._slots[self._turn]
        slot.wait()
        return slot

    def _send(self, slot: _Slot, layer: int, device_pages: PageNumbers, kept: Bools) -> None:
        count = int(kept.sum())
        if not count:
            return
        if count < len(kept):
            rows = slot.pinned.numpy()
            rows[:count] = rows[: len(kept)][kept]
        slot.index[:count] = torch.from_numpy(device_pages[kept].astype(np.int64))
        with self._stream:
            slot.on_device[:count].copy_(slot.pinned[:count], non_blocking=True)
            slot.index_on_device[:count].copy_(slot.index[:count], non_blocking=True)
            into = self._memory.device_rows()
            rows_on_device = slot.on_device[:count].view(into.dtype)
            for half in (0, 1):
                into[:, layer, half].index_copy_(0, slot.index_on_device[:count], rows_on_device[:, half])
        slot.is_free = self._stream.fence()


def copy_on_devices(
    source: PageMemory, target: PageMemory, layers: range, pages: PageNumbers, target_pages: PageNumbers
) -> None:
    """Copy pages between memories of GPUs (or of one) on the current stream; crosses the link once per layer."""
    begin, end = source.device_rows(), target.device_rows()
    from_index, to_index = numbers_on(pages, begin.device), numbers_on(target_pages, end.device)
    for layer in layers:
        rows: Any = begin[:, layer].index_select(0, from_index).to(end.device, non_blocking=True)
        for half in (0, 1):
            end[:, layer, half].index_copy_(0, to_index, rows[:, half])
