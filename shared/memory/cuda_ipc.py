"""Device memory of another process, by CUDA IPC: the contents of ``PoolHandle.ipc``, and how it is opened safely.

The bytes are one :class:`CudaExport`, plain data: the values that torch's ``_share_cuda_`` gives, in its order, and
those that make a tensor of them. No class or function is named, so nothing that another process wrote decides which
code runs. ``torch`` is an argument, since ``shared`` does not import it.

CUDA numbers GPUs differently in processes with another ``CUDA_VISIBLE_DEVICES``. So an export names its GPU by UUID,
and is opened on the device that has this UUID here.
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

from shared.errors import TransportError
from shared.memory.device_pool_view import check_device_handle, check_is_whole
from shared.messages.pools import PoolHandle
from shared.undecodable import UNDECODABLE

EVENT_BYTES = 64
"""Size of ``cudaIpcEventHandle_t``. torch reads that many bytes, however many there are."""

HANDLE_BYTES = range(64, 65_537)
"""Size of a memory handle: a ``cudaIpcMemHandle_t`` and torch's header, longer for segments that can be expanded."""

COUNTERS = 10_000
"""Number of counters in one of torch's files of them (``CUDA_IPC_REF_COUNTER_FILE_SIZE``)."""

_COUNTER_FILE = re.compile(rb"/torch_[0-9]+_[0-9]+_[0-9]+")
"""Torch's names of such files. A process that releases a tensor writes to the file, so no other name is taken."""


class CudaExport(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A uint8 tensor in CUDA memory, as another process opens it.

    ``handle`` to ``waits_for_event`` are the results of ``UntypedStorage._share_cuda_`` behind the device:
    ``storage_bytes`` at ``storage_offset_bytes`` of an allocation, a counter that the process that opened it decrements
    at the end, and an event after which the bytes may be used. ``offset``, ``shape`` and ``stride`` count elements.
    """

    device_uuid: str
    handle: bytes
    storage_bytes: int
    storage_offset_bytes: int
    counter_file: bytes
    counter: int
    event: bytes
    waits_for_event: bool
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str = "uint8"


def export(tensor: Any, torch: Any) -> bytes:
    """Return the handle of a uint8 CUDA tensor, for one further process. Raises TransportError where that fails.

    The tensor lives as long as it is mapped anywhere.
    """
    storage = tensor.untyped_storage()
    try:
        device, handle, nbytes, offset, counter_file, counter, event, waits = storage._share_cuda_()
        made = CudaExport(
            device_uuid=_uuid(torch, device),
            handle=handle,
            storage_bytes=nbytes,
            storage_offset_bytes=offset,
            counter_file=counter_file,
            counter=counter,
            event=event,
            waits_for_event=waits,
            offset=tensor.storage_offset(),
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            dtype=str(tensor.dtype).removeprefix("torch."),
        )
    except (RuntimeError, ValueError, AttributeError) as error:
        raise TransportError(f"device memory cannot be exported by CUDA IPC: {error}") from error
    return msgspec.msgpack.encode(made)


def read_export(ipc: bytes) -> CudaExport:
    """Parse the bytes of :func:`export`. Raises TransportError for other bytes, and for impossible values."""
    try:
        found = msgspec.msgpack.decode(ipc, type=CudaExport)
    except UNDECODABLE as error:
        raise TransportError(f"the IPC handle is not that of a CUDA tensor: {error}") from error
    fault = _fault(found)
    if fault:
        raise TransportError(f"the IPC handle is not that of a CUDA tensor: {fault}")
    return found


def open_halves(handle: PoolHandle, torch: Any) -> Any:
    """Map a device pool as a uint8 CUDA tensor [layers, 2, pages, half_bytes], mapped while the tensor lives.

    Raises TransportError if the handle is not of such a pool or CUDA cannot open it.
    """
    check_device_handle(handle)
    check_is_whole(handle)
    found = read_export(handle.ipc)
    geometry = handle.geometry
    shape = (geometry.layers, 2, handle.pages, geometry.half_bytes)
    if found.shape != shape or found.stride != _contiguous(shape) or found.dtype != "uint8":
        raise TransportError(
            f"the exported tensor is {found.dtype} {found.shape} in steps of {found.stride}, not uint8 {shape}"
        )
    device = find_device(found.device_uuid, torch)
    try:
        storage = torch.UntypedStorage._new_shared_cuda(  # noqa: SLF001 - torch has no public name for it.
            device,
            found.handle,
            found.storage_bytes,
            found.storage_offset_bytes,
            found.counter_file,
            found.counter,
            found.event,
            found.waits_for_event,
        )
        # The event holds up the stream on which the memory was opened, and copies run on others.
        torch.cuda.current_stream(device).synchronize()
        halves = torch.empty(0, dtype=torch.uint8, device=storage.device)
        return halves.set_(storage, found.offset, found.shape, found.stride)
    except Exception as error:  # Of whatever kind: torch's own and the driver's.
        raise TransportError(f"cannot open the CUDA IPC handle of a device pool: {error}") from error


def find_device(uuid: str, torch: Any) -> int:
    """Return this process's number of the GPU with a UUID.

    Raises TransportError where it sees none of this UUID, or several.
    """
    try:
        seen = [_uuid(torch, index) for index in range(torch.cuda.device_count())]
    except (RuntimeError, AttributeError) as error:
        raise TransportError(f"the GPUs of this process cannot be told apart: {error}") from error
    found = [index for index, each in enumerate(seen) if each == uuid]
    if len(found) != 1:
        raise TransportError(
            f"the device pool is on GPU {uuid}, and this process sees {', '.join(seen) or 'none'}: give every process "
            "of a node the same CUDA_VISIBLE_DEVICES"
        )
    return found[0]


def _uuid(torch: Any, device: int) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _fault(found: CudaExport) -> str:
    """Return the part of an export that must not be given to torch, or ""."""
    if len(found.handle) not in HANDLE_BYTES:
        return f"a memory handle of {len(found.handle)} bytes"
    if len(found.event) != EVENT_BYTES:
        return f"an event handle of {len(found.event)} bytes"
    if not _COUNTER_FILE.fullmatch(found.counter_file) or not 0 <= found.counter < COUNTERS:
        return f"counter {found.counter} of {found.counter_file[:64]!r}"
    if len(found.shape) != len(found.stride) or min((*found.shape, *found.stride, 1)) < 1:
        return f"shape {found.shape} in steps of {found.stride}"
    last = found.offset + sum((size - 1) * step for size, step in zip(found.shape, found.stride, strict=True))
    # The numbers become 64-bit integers of C.
    if min(found.offset, found.storage_offset_bytes) < 0 or not last < found.storage_bytes < 2**63:
        return f"elements up to {last} in {found.storage_bytes} bytes"
    if found.storage_offset_bytes >= 2**62:
        return f"a storage at {found.storage_offset_bytes}"
    return ""
