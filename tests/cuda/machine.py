"""A machine with GPUs as its processes see it, without one: numbering of devices and the rules of CUDA IPC.

Device memory is CPU memory here. A process is entered (``with process:``); what torch then asks of CUDA is answered for
that process: which devices there are, ``_share_cuda_`` and ``_new_shared_cuda``, with the tuples and checks of torch's
``StorageSharing.cpp``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Self
from unittest.mock import patch

import torch

EVENT_BYTES = 64


@dataclass
class Export:
    """What a process has exported."""

    owner: str
    uuid: str
    storage: Any
    opened: int = 0


@dataclass
class CudaMachine:
    """GPUs by UUID, and everything that was exported on them."""

    uuids: Sequence[str]
    exports: dict[bytes, Export] = field(default_factory=dict)
    events: dict[bytes, str] = field(default_factory=dict)  # Handle of an event to the process that made it.
    waited: list[bytes] = field(default_factory=list)  # Events for which a stream was held up.
    synchronized: list[tuple[str, int]] = field(default_factory=list)  # (process, device) of streams waited for.

    def process(self, name: str, visible: Sequence[int] | None = None) -> CudaProcess:
        """A process with these of the GPUs in its CUDA_VISIBLE_DEVICES; all of them by default."""
        order = range(len(self.uuids)) if visible is None else visible
        return CudaProcess(self, name, [self.uuids[index] for index in order])


class CudaProcess:
    """One process; what it allocates is on its device ``current``."""

    def __init__(self, machine: CudaMachine, name: str, uuids: list[str]) -> None:
        self.machine, self.name, self.uuids = machine, name, uuids
        self.current = 0
        self._received: list[Any] = []
        self._patches: list[ExitStack] = []

    def __enter__(self) -> Self:
        patches = ExitStack()
        for target, name, stand_in in (
            (torch.cuda, "device_count", lambda: len(self.uuids)),
            (torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=self.uuids[index])),
            (torch.cuda, "current_stream", self._stream),
            (torch.UntypedStorage, "_share_cuda_", lambda storage: self._share(storage)),
            (torch.UntypedStorage, "_new_shared_cuda", staticmethod(self._open)),
        ):
            patches.enter_context(patch.object(target, name, stand_in))
        self._patches.append(patches)
        return self

    def __exit__(self, *error: object) -> None:
        self._patches.pop().close()

    def _stream(self, device: int) -> Any:
        return SimpleNamespace(synchronize=lambda: self.machine.synchronized.append((self.name, device)))

    def _share(self, storage: Any) -> tuple[int, bytes, int, int, bytes, int, bytes, bool]:
        """As ``THPStorage_shareCuda``."""
        if any(storage.data_ptr() == each.data_ptr() for each in self._received):
            raise RuntimeError("Attempted to send CUDA tensor received from another process")
        number = len(self.machine.exports)
        handle = b"\x01c" + number.to_bytes(64, "little")  # torch's version and kind, then the driver's 64 bytes.
        event = number.to_bytes(EVENT_BYTES, "little")
        self.machine.exports[handle] = Export(self.name, self.uuids[self.current], storage)
        self.machine.events[event] = self.name
        return self.current, handle, storage.nbytes(), 0, f"/torch_{number}_7_0".encode(), number, event, True

    def _open(
        self,
        device: int,
        handle: bytes,
        nbytes: int,
        offset: int,
        counter_file: bytes,
        counter: int,
        event: bytes,
        waits_for_event: bool,
        /,
    ) -> Any:
        """As ``THPStorage_newSharedCuda``, with what the driver refuses."""
        taken = (device, handle, nbytes, offset, counter_file, counter, event, waits_for_event)
        if [type(each) for each in taken] != [int, bytes, int, int, bytes, int, bytes, bool]:
            raise TypeError("_new_shared in CUDA mode: invalid arguments")
        made = self.machine.exports.get(handle)
        if made is None or nbytes != made.storage.nbytes() or len(event) < EVENT_BYTES:
            raise RuntimeError("CUDA error: invalid resource handle")
        if made.owner == self.name:
            raise RuntimeError("CUDA error: invalid device context")
        if self.uuids[device] != made.uuid:
            raise RuntimeError("CUDA error: the handle is of another device")
        if waits_for_event:
            if self.machine.events.get(event) in (None, self.name):
                raise RuntimeError("CUDA error: invalid resource handle")
            self.machine.waited.append(event)
        made.opened += 1
        self._received.append(made.storage)
        return made.storage
