"""A worker's device pool in CUDA memory, mapped by CUDA IPC. The only module of the storage that needs torch.

``PoolHandle.ipc`` is made by the worker and opened as ``shared.memory.cuda_ipc`` describes. Pages are gathered into
page-first order on the device, by one strided copy, and then cross the bus as one contiguous piece into the
host pool, which is registered as pinned memory. Both run on a low-priority stream of this process, so that a
backup yields to the worker's kernels.

No caller waits for registration. Memory that is not pinned - buffers of chunks in flight to the disk, and the
host pool until it is - is reached by way of memory that torch has pinned.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shared import logs
from shared.errors import DeviceFailed, TransportError
from shared.memory.cuda_ipc import open_halves
from shared.memory.cuda_runtime import loaded_runtime, sticky_reason
from shared.memory.device_pool_view import DeviceRun
from shared.memory.pinned import PinnedMemory
from shared.messages.pools import PoolHandle

_log = logs.get_logger("storage")

# torch leaves these functions without types.
_cuda: Any = torch.cuda

_LOW_PRIORITY = 0  # CUDA's numbers are lower for more urgent streams; 0 is the least urgent.

_MEMORY = PinnedMemory(loaded_runtime)

_devices: list[torch.device] = []
"""GPUs on which pools were opened, in this order."""

_pinning: list[threading.Thread] = []

_failed: dict[torch.device, str] = {}
"""GPUs that this process cannot use any more, and why: their context is broken until it ends."""


def start_pinning(array: npt.NDArray[np.uint8]) -> None:
    """Register ``array`` with the driver, in the background. If it refuses, copies go by way of other memory."""

    def pin() -> None:
        try:
            if _devices:  # Otherwise the driver would make a context on the first GPU, which another process may use.
                _cuda.set_device(_devices[0])
            _MEMORY.register(array)
        except TransportError as error:
            _log.warning("host_pool_not_pinned", reason=error.message)
        else:
            _log.info("host_pool_pinned", nbytes=array.nbytes)

    thread = threading.Thread(target=pin, name="pinning", daemon=True)
    _pinning.append(thread)
    thread.start()


def unpin(array: npt.NDArray[np.uint8]) -> None:
    """Undo :func:`start_pinning`, after waiting for its end; no copy is under way."""
    while _pinning:
        _pinning.pop().join()
    try:
        _MEMORY.unregister(array)
    except TransportError as error:
        _log.warning("host_pool_not_unpinned", reason=error.message)


class CudaDevicePool:
    """Satisfies ``shared.memory.device_pool_view.DevicePages``. Used by several I/O threads at once."""

    def __init__(self, handle: PoolHandle, halves: torch.Tensor) -> None:
        """Prepare; ``halves`` is the mapped uint8 tensor [layers, 2, pages, half_bytes] on the worker's device."""
        self.handle = handle
        self._halves: torch.Tensor | None = halves
        self._device = halves.device
        self._stream = _cuda.Stream(device=halves.device, priority=_LOW_PRIORITY)

    @classmethod
    def attach(cls, handle: PoolHandle) -> CudaDevicePool:
        """Map the pool. Raises TransportError if the handle is no such pool's or CUDA cannot open it."""
        made = cls(handle, open_halves(handle, torch))
        _devices.append(made._device)
        return made

    @property
    def fault(self) -> str:
        """Why the GPU's context in this process is broken; "" while it works."""
        return _failed.get(self._device, "")

    def copy_run(self, run: DeviceRun, into: npt.NDArray[np.uint8]) -> None:
        """Gather the run's pages on the device and copy them to ``into``; see ``DevicePages``.

        Raises DeviceFailed for a GPU that this process cannot use any more.
        """
        device, host, count = run
        rows = into[host : host + count]
        if not _MEMORY.covers(rows):
            rows[...] = self.gather(device, count).reshape(rows.shape)
            return
        self._copy(device, count, torch.from_numpy(rows.reshape(count, -1)))

    def gather(self, device: int, count: int) -> npt.NDArray[np.uint8]:
        """Return a copy of the pages, by way of pinned memory; see ``shared.memory.device_pool_view.GatheredPages``."""
        layers, _, _, half_bytes = self._mapped().shape
        try:
            target = _pinned_rows(count, layers * 2 * half_bytes)
        except RuntimeError as error:
            raise self._translated(error) from error
        self._copy(device, count, target)
        gathered: npt.NDArray[np.uint8] = target.numpy().reshape(count, layers, 2, half_bytes)
        return gathered

    def close(self) -> bool:
        """Release the mapping; a running copy holds its own reference. See ``DevicePages``."""
        self._halves = None
        return True

    def _mapped(self) -> torch.Tensor:
        """Return the mapped pool. Raises DeviceFailed or TransportError when it cannot be read."""
        if self.fault:
            raise DeviceFailed(f"the device pool is lost: {self.fault}")
        halves = self._halves
        if halves is None:
            raise TransportError("the device pool is closed")
        return halves

    def _copy(self, device: int, count: int, target: torch.Tensor) -> None:
        """Copy pages into pinned memory, uint8 [count, page_bytes]; they are there when it returns."""
        halves = self._mapped()
        try:
            with _cuda.stream(self._stream):
                gathered = halves[:, :, device : device + count].permute(2, 0, 1, 3).reshape(count, -1)
                target.copy_(gathered, non_blocking=True)
                done = _cuda.Event()
                done.record(self._stream)
            done.synchronize()
        except RuntimeError as error:
            raise self._translated(error) from error

    def _translated(self, error: RuntimeError) -> TransportError:
        """Return the error to raise; after a permanent error this GPU is not used any more."""
        reason = sticky_reason(error)
        if not reason:
            return TransportError(f"cannot copy from the device pool: {error}")
        if self._device not in _failed:
            _failed[self._device] = f"GPU {self._device.index} failed in this process: {reason}"
            _log.error("gpu_bridge_ended", device=str(self._device), reason=reason)
        return DeviceFailed(f"the device pool is lost: {self.fault}")


def _pinned_rows(count: int, nbytes: int) -> torch.Tensor:
    """Return uint8 [count, nbytes] in memory that torch has pinned, and keeps for later use."""
    return torch.empty(count, nbytes, dtype=torch.uint8, pin_memory=True)
