"""Shared memory that this worker lends to storages for answers, in slots of equal size.

A slot is taken for one read, and given back when the storage has ended it *and* what came was copied out, whichever is
later. Until then it has no other use: there is no telling a late answer from a new one by looking at memory.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.errors import ConfigError, TransportError
from shared.memory import SharedSegment
from shared.messages.sparse_reads import BUFFER_KIND

SLOTS = 16
"""Enough for the reads of several requests, and for a few whose storage is silent."""

ALIGNMENT = 64
"""Bytes of a cache line."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadSlot:
    """``memory``, uint8 ``[slot_bytes]``, lies at ``offset`` of the segment ``buffer``."""

    buffer: str
    offset: int
    memory: npt.NDArray[np.uint8]


class ReadBuffers:
    """Used by several threads at once. The segment is made when the first slot is taken."""

    def __init__(self, shm_prefix: str, nbytes: int, *, slots: int = SLOTS) -> None:
        """Reserve the slots. Raises ConfigError when there is no room for them."""
        self.slot_bytes = nbytes // slots // ALIGNMENT * ALIGNMENT
        if not self.slot_bytes:
            raise ConfigError(f"{nbytes} bytes are too few for {slots} slots of {ALIGNMENT} bytes at the least")
        self._shm_prefix, self._slots = shm_prefix, slots
        self._segment: SharedSegment | None = None
        self._free: list[ReadSlot] = []
        self._changed = threading.Condition()
        self._is_closed = False

    @property
    def taken(self) -> int:
        """Number of slots in use."""
        with self._changed:
            return 0 if self._segment is None else self._slots - len(self._free)

    def take(self, timeout_s: float) -> ReadSlot:
        """Take a slot. Raises TransportError when none is given back in time or there is no memory for them."""
        slot = self._take(timeout_s)
        if slot is None:
            raise TransportError(f"all {self._slots} slots for reads of parts of a prefix are in use")
        return slot

    def take_at_once(self) -> ReadSlot | None:
        """Take a slot if one is free. Raises TransportError like :meth:`take`."""
        return self._take(0.0)

    def give_back(self, slot: ReadSlot) -> None:
        """Free a slot that nothing reads or writes any more."""
        with self._changed:
            if not self._is_closed:
                self._free.append(slot)
                self._changed.notify()

    def close(self) -> None:
        """Remove the segment; slots that are in use stay mapped as long as they are. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._free.clear()
            if self._segment is not None:
                self._segment.unlink()
                self._segment.close()
                self._segment = None
            self._changed.notify_all()

    def _take(self, timeout_s: float) -> ReadSlot | None:
        until_s = time.monotonic() + timeout_s
        with self._changed:
            if self._segment is None and not self._is_closed:
                self._make()
            while not self._free and not self._is_closed:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    return None
                self._changed.wait(left_s)
            if self._is_closed:
                raise TransportError("the worker is stopping")
            return self._free.pop()

    def _make(self) -> None:
        try:
            segment = SharedSegment.create(self._shm_prefix, BUFFER_KIND, self._slots * self.slot_bytes)
        except ConfigError as error:
            raise TransportError(f"there is no memory for reads of parts of a prefix: {error.message}") from error
        self._segment = segment
        for offset in range(0, segment.nbytes, self.slot_bytes):
            self._free.append(ReadSlot(segment.name, offset, segment.array[offset : offset + self.slot_bytes]))
