"""A worker's device pool in CUDA memory, mapped by CUDA IPC: the only module of the storage that needs torch.

``PoolHandle.ipc`` is made by the worker and opened as ``shared.memory.cuda_ipc`` describes. Pages are gathered into
page-first order on the device, by one strided copy, and then cross the bus as one contiguous piece into the
host pool, which is registered as pinned memory. Both run on a low-priority stream of this process, so that a
backup yields to the worker's kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shared.errors import TransportError
from shared.memory.cuda_ipc import open_halves
from shared.memory.device_pool_view import DeviceRun
from shared.memory.pinned import register
from shared.messages.pools import PoolHandle

# torch leaves these functions without types.
_cuda: Any = torch.cuda

_LOW_PRIORITY = 0  # CUDA's numbers are lower for more urgent streams; 0 is the least urgent.


class CudaDevicePool:
    """Satisfies ``shared.memory.device_pool_view.DevicePages``. Used by several I/O threads at once."""

    def __init__(self, handle: PoolHandle, halves: torch.Tensor) -> None:
        """``halves`` is the mapped uint8 tensor [layers, 2, pages, half_bytes] on the worker's device."""
        self.handle = handle
        self._halves: torch.Tensor | None = halves
        self._stream = _cuda.Stream(device=halves.device, priority=_LOW_PRIORITY)
        self._pinned: set[int] = set()

    @classmethod
    def attach(cls, handle: PoolHandle) -> CudaDevicePool:
        """Map the pool. Raises TransportError if the handle is no such pool's or CUDA cannot open it."""
        return cls(handle, open_halves(handle, torch))

    def copy_run(self, run: DeviceRun, into: npt.NDArray[np.uint8]) -> None:
        """See ``DevicePages``."""
        halves = self._halves
        if halves is None:
            raise TransportError("the device pool is closed")
        if into.ctypes.data not in self._pinned:
            register(_cuda.cudart(), into)
            self._pinned.add(into.ctypes.data)
        device, host, count = run
        target = torch.from_numpy(into[host : host + count].reshape(count, -1))
        try:
            with _cuda.stream(self._stream):
                gathered = halves[:, :, device : device + count].permute(2, 0, 1, 3).reshape(count, -1)
                target.copy_(gathered, non_blocking=True)
                done = _cuda.Event()
                done.record(self._stream)
            done.synchronize()
        except RuntimeError as error:
            raise TransportError(f"cannot copy from the device pool: {error}") from error

    def gather(self, device: int, count: int) -> npt.NDArray[np.uint8]:
        """See ``shared.memory.device_pool_view.GatheredPages``: a copy, by way of pinned memory."""
        halves = self._halves
        if halves is None:
            raise TransportError("the device pool is closed")
        layers, _, _, half_bytes = halves.shape
        try:
            target = torch.empty(count, layers, 2, half_bytes, dtype=torch.uint8, pin_memory=True)
            with _cuda.stream(self._stream):
                target.copy_(halves[:, :, device : device + count].permute(2, 0, 1, 3), non_blocking=True)
                done = _cuda.Event()
                done.record(self._stream)
            done.synchronize()
        except RuntimeError as error:
            raise TransportError(f"cannot copy from the device pool: {error}") from error
        rows: npt.NDArray[np.uint8] = target.numpy()
        return rows

    def close(self) -> bool:
        """Let go of the mapping; a copy that runs holds its own reference. See ``DevicePages``."""
        self._halves = None
        return True
