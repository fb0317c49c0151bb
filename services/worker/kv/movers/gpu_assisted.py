"""A GPU kernel reads the pages out of pinned host memory itself (Strata section 4.2).

Thousands of threads each keep a few 16-byte reads in flight, so small pages cost no more than large ones, and
page-first becomes layer-first on the way. The kernel runs as few large programs, so that it leaves the rest of the GPU
to the model; loads, which requests wait for, get more of them than backups, which nobody waits for.

The kernel reads host memory after the processor has verified it there, not a private copy: a storage that broke its
promise not to touch pages of a running load within those microseconds would go unnoticed. The identity table is looked
at again when the load has ended, which finds a page that was given away meanwhile.
"""

from __future__ import annotations

import numpy as np
import torch

from services.worker.kernels.page_gather import MAX_PROGRAMS, copy_pages
from services.worker.kv.device_pool import DevicePool
from services.worker.kv.movers.protocol import Fence, MoverName, PageMover
from services.worker.kv.movers.side_stream import side_stream
from services.worker.kv.page_memory import Bools, PageLayout, PageMemory, PageNumbers
from services.worker.kv.row_checks import RowChecks
from services.worker.native.page_rows import can_hash, native_rows
from shared.errors import TransportError

LOAD_PROGRAMS = 2
"""Programs of 1,024 threads for loads, and half as many for backups: the default of Strata section 4.2."""

PIECE_BYTES = 16 * 2**20
"""Bytes of one layer in one launch."""


class GpuAssistedMover:
    """Satisfies :class:`~services.worker.kv.movers.protocol.PageMover`. ``unpinned`` moves what the driver would not
    pin; without it such a source is an error.
    """

    name: MoverName = "gpu_assisted"

    def __init__(self, pool: DevicePool, *, programs: int = LOAD_PROGRAMS, unpinned: PageMover | None = None) -> None:
        assert 1 <= programs <= MAX_PROGRAMS
        self._memory = pool.memory()
        self._device = pool.device
        self._programs = programs
        self._unpinned = unpinned
        self.piece_pages = max(1, PIECE_BYTES // (2 * pool.geometry.half_bytes))
        self._stream = side_stream(pool.device)
        if pool.device.type == "cuda":
            self._warm_up(PageLayout.page_first(pool.geometry, 1))

    def load(
        self,
        source: PageMemory,
        layers: range,
        pages: PageNumbers,
        device_pages: PageNumbers,
        checks: RowChecks | None = None,
    ) -> Bools:
        if self._cannot_reach(source):
            if self._unpinned is None:
                raise TransportError("a GPU cannot read host memory that is not pinned")
            wrong = self._unpinned.load(source, layers, pages, device_pages, checks)
            # One fence speaks for both, so nothing of the other may be left.
            self._unpinned.drain()
            return wrong
        wrong = np.zeros(len(pages), dtype=bool)
        if checks is not None:
            wrong = _failed(source, layers, pages, checks)
        self._launch(source, self._memory, layers, pages[~wrong], device_pages[~wrong], self._programs)
        return wrong

    def store(self, target: PageMemory, layers: range, device_pages: PageNumbers, pages: PageNumbers) -> None:
        if self._cannot_reach(target):
            if self._unpinned is None:
                raise TransportError("a GPU cannot write host memory that is not pinned")
            self._unpinned.store(target, layers, device_pages, pages)
            return
        self._launch(self._memory, target, layers, device_pages, pages, max(1, self._programs // 2))
        self.drain()

    def fence(self) -> Fence | None:
        return self._stream.fence()

    def drain(self) -> None:
        self._stream.drain()

    def _cannot_reach(self, memory: PageMemory) -> bool:
        """Whether a kernel on this device would fault on these bytes (the interpreter, for tests, reaches all)."""
        if self._device.type == "cpu":
            return False
        return not memory.is_pinned if memory.tensor is None else memory.tensor.device != self._device

    def _warm_up(self, host: PageLayout) -> None:
        """Compile the kernel for both directions now rather than in somebody's first load; it copies nothing."""
        memory = self._memory.tensor
        assert memory is not None
        nothing = torch.zeros((2, 0), dtype=torch.int32, device=self._device)
        device = self._memory.layout
        for begin, end in ((host, device), (device, host)):
            copy_pages(memory, begin, memory, end, nothing, range(1), programs=1)

    def _launch(
        self,
        source: PageMemory,
        target: PageMemory,
        layers: range,
        pages: PageNumbers,
        target_pages: PageNumbers,
        programs: int,
    ) -> None:
        if not len(pages):
            return
        with self._stream:
            numbers = torch.from_numpy(np.stack((pages, target_pages)).astype(np.int32)).to(self._device)
            copy_pages(_flat(source), source.layout, _flat(target), target.layout, numbers, layers, programs=programs)


def _flat(memory: PageMemory) -> torch.Tensor:
    """Flat uint8. Of pinned memory this is an alias: its address is valid on the GPU too."""
    if memory.tensor is not None:
        return memory.tensor
    assert memory.array is not None
    return torch.from_numpy(memory.array)


def _failed(source: PageMemory, layers: range, pages: PageNumbers, checks: RowChecks) -> Bools:
    """Check rows where they are; bool [pages]."""
    native = native_rows()
    if native is not None and can_hash(source.layout.half_bytes):
        return native.move_checked(source, None, layers, pages, pages, checks)
    rows, wrong = source.host_rows(), np.zeros(len(pages), dtype=bool)
    for index, page in enumerate(pages.tolist()):
        for at, layer in enumerate(layers):
            row = np.ascontiguousarray(rows[page, layer]).reshape(-1)
            wrong[index] = wrong[index] or not checks.holds(row, index, at)
    return wrong
