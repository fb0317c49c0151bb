"""Device memory of another process, by CUDA IPC: what ``PoolHandle.ipc`` holds, and how it is opened safely.

The handle is the pickle of ``torch.multiprocessing.reductions.reduce_tensor(pool)``. Unpickling may call anything that
a pickle names, so only what an exported tensor needs is let through, whoever wrote the handle. Nothing here imports
torch; opening a handle does, in processes that have it.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from shared.errors import TransportError
from shared.memory.device_pool_view import check_device_handle, check_is_whole
from shared.messages.pools import PoolHandle

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


def open_halves(handle: PoolHandle) -> Any:
    """The device pool of ``handle`` as a uint8 CUDA tensor [layers, 2, pages, half_bytes]; it stays mapped while the
    tensor lives. Raises TransportError if the handle is no such pool's or CUDA cannot open it.
    """
    check_device_handle(handle)
    check_is_whole(handle)
    rebuild, arguments = unpickle_handle(handle.ipc)
    try:
        halves = rebuild(*arguments)
    except Exception as error:
        raise TransportError(f"cannot open the CUDA IPC handle of a device pool: {error}") from error
    geometry = handle.geometry
    shape = (geometry.layers, 2, handle.pages, geometry.half_bytes)
    if tuple(halves.shape) != shape or str(halves.dtype) != "torch.uint8" or not halves.is_contiguous():
        raise TransportError(f"the CUDA tensor has shape {tuple(halves.shape)} of {halves.dtype}, not uint8 {shape}")
    return halves
