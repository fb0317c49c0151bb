"""Writing verified rows of one layer into the device pool: a plain copy on CPU, one indexed copy on a GPU.

A row is K then V of one page in one layer, ``2 * half_bytes`` uint8. The caller gathers rows into
``staging``, verifies them there and has those very bytes written, so nobody can change them in between.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from services.worker.kv.device_pool import DevicePool

STAGED_PAGES = 64
"""Rows gathered, verified and written at a time: enough to amortise a call, few enough to stay in cache."""

Rows = npt.NDArray[np.uint8]
PageNumbers = npt.NDArray[np.int32]


class PageWriter(Protocol):
    """How loads reach the device pool. Used by one thread."""

    staging: Rows  # uint8 [STAGED_PAGES, 2 * half_bytes]

    def write(self, layer: int, device_pages: PageNumbers, count: int) -> None:
        """Write the first ``count`` staged rows; when it returns, attention may read them."""


def page_writer(pool: DevicePool) -> PageWriter:
    """The writer for this pool's kind of memory."""
    return CpuPageWriter(pool) if pool.device.type == "cpu" else CudaPageWriter(pool)


class CpuPageWriter:
    """Into shared memory."""

    def __init__(self, pool: DevicePool) -> None:
        half = pool.geometry.half_bytes
        self._half = half
        self._halves = pool.bytes_view()
        self.staging: Rows = np.empty((STAGED_PAGES, 2 * half), dtype=np.uint8)

    def write(self, layer: int, device_pages: PageNumbers, count: int) -> None:
        rows = self.staging[:count]
        self._halves[layer, 0][device_pages] = rows[:, : self._half]
        self._halves[layer, 1][device_pages] = rows[:, self._half :]


class CudaPageWriter:
    """Through pinned memory on a stream of its own, so that loads overlap the kernels of earlier layers."""

    def __init__(self, pool: DevicePool) -> None:
        half = pool.geometry.half_bytes
        self._half = half
        self._pool = pool
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device=pool.device)  # type: ignore[no-untyped-call]
        self._pinned = torch.empty((STAGED_PAGES, 2 * half), dtype=torch.uint8, pin_memory=True)
        self.staging: Rows = self._pinned.numpy()

    def write(self, layer: int, device_pages: PageNumbers, count: int) -> None:
        geometry = self._pool.geometry
        with torch.cuda.stream(self._stream), torch.inference_mode():
            rows = self._pinned[:count].to(self._pool.device, non_blocking=True)
            index = torch.from_numpy(device_pages.astype(np.int64)).to(self._pool.device)
            for half, begin in ((self._pool.k(layer), 0), (self._pool.v(layer), self._half)):
                target = half.view(self._pool.pages, -1).view(torch.uint8)
                assert target.shape[1] == geometry.half_bytes
                target.index_copy_(0, index, rows[:, begin : begin + self._half])
        # The staging rows are used again at once, and the gate promises that the bytes are there.
        self._stream.synchronize()
