"""A worker's device pool in CUDA memory, mapped by CUDA IPC: the only module of the storage that needs torch.

``PoolHandle.ipc`` is made by the worker as ``shared.memory.device_pool_view`` describes. Pages are gathered into
page-first order on the device, by one strided copy, and then cross the bus as one contiguous piece into the
host pool, which is registered as pinned memory. Both run on a low-priority stream of this process, so that a
backup yields to the worker's kernels.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shared.errors import TransportError
from shared.memory.device_pool_view import DeviceRun, check_device_handle
from shared.messages.pools import PoolHandle

# torch leaves these functions without types.
_cuda: Any = torch.cuda

# cudaHostRegisterPortable: pinned for every CUDA context of this process.
_REGISTER_PORTABLE = 1
_ALREADY_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered

_LOW_PRIORITY = 0  # CUDA's numbers are lower for more urgent streams; 0 is the least urgent.

# What a pickle of an exported tensor may name. Nothing else is ever called, whoever wrote the handle.
_ALLOWED = {
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
    ("torch", "Size"),
    ("torch", "Tensor"),
    ("torch", "UntypedStorage"),
    ("torch.storage", "UntypedStorage"),
    ("torch", "uint8"),
}


class _HandleUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"an IPC handle may not name {module}.{name}")
        return super().find_class(module, name)


def unpickle_handle(ipc: bytes) -> tuple[Any, tuple[Any, ...]]:
    """``(rebuild, arguments)`` of an exported CUDA tensor. Raises TransportError for any other pickle."""
    try:
        rebuild, arguments = _HandleUnpickler(io.BytesIO(ipc)).load()
    except Exception as error:  # Damaged pickles raise almost anything.
        raise TransportError(f"the IPC handle is not that of a CUDA tensor: {error}") from error
    if getattr(rebuild, "__name__", "") != "rebuild_cuda_tensor" or not isinstance(arguments, tuple):
        raise TransportError("the IPC handle is not that of a CUDA tensor")
    return rebuild, arguments


def pin(array: npt.NDArray[np.uint8]) -> None:
    """Register the memory under ``array`` as pinned, once; it stays so until the process ends.

    Raises TransportError when the driver refuses (mostly for the limit on locked memory).
    """
    address, nbytes = array.ctypes.data, array.nbytes
    code = int(_cuda.cudart().cudaHostRegister(address, nbytes, _REGISTER_PORTABLE))
    if code not in (0, _ALREADY_REGISTERED):
        raise TransportError(f"cudaHostRegister of {nbytes} bytes failed with code {code}: see ulimit -l")


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
        check_device_handle(handle)
        rebuild, arguments = unpickle_handle(handle.ipc)
        try:
            halves = rebuild(*arguments)
        except Exception as error:
            raise TransportError(f"cannot open the CUDA IPC handle of a device pool: {error}") from error
        geometry = handle.geometry
        shape = (geometry.layers, 2, handle.pages, geometry.half_bytes)
        if tuple(halves.shape) != shape or halves.dtype != torch.uint8:
            raise TransportError(
                f"the CUDA tensor has shape {tuple(halves.shape)} of {halves.dtype}, not uint8 {shape}"
            )
        return cls(handle, halves)

    def copy_run(self, run: DeviceRun, into: npt.NDArray[np.uint8]) -> None:
        """See ``DevicePages``."""
        halves = self._halves
        if halves is None:
            raise TransportError("the device pool is closed")
        if into.ctypes.data not in self._pinned:
            pin(into)
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

    def close(self) -> bool:
        """Let go of the mapping; a copy that runs holds its own reference. See ``DevicePages``."""
        self._halves = None
        return True
