"""Memory for chunks in transit to or from a tier: a bounded number of buffers that begin on a block.

They are cut from one anonymous mapping, so they begin on a block, as O_DIRECT requires; with huge pages a chunk is a
few pieces for the disk instead of hundreds. Memory is taken when a buffer is first used, and used buffers are
preferred, so that a chunk costs no page faults. A buffer holds its earlier content, perhaps of another tenant: its next
user overwrites all of it or uses only the bytes that were read into it.
"""

from __future__ import annotations

import mmap
import threading

import numpy as np
import numpy.typing as npt

from services.storage.backends import BLOCK_BYTES
from shared.errors import CapacityError, ConfigError, InvariantViolated


class Staging:
    """Buffers of ``blob_bytes`` bytes each, as many as ``budget_bytes`` pay for. All calls may come from any thread."""

    def __init__(self, budget_bytes: int, blob_bytes: int) -> None:
        """Plan the buffers; memory is taken when it is first needed.

        Raises ConfigError if not even one buffer fits.
        """
        if blob_bytes < 1 or blob_bytes % BLOCK_BYTES:
            raise InvariantViolated(f"a buffer of {blob_bytes} bytes is not whole blocks")
        if budget_bytes < blob_bytes:
            raise ConfigError(
                f"{budget_bytes} bytes hold no chunk of {blob_bytes} bytes on its way: raise --staging-bytes"
            )
        self.blob_bytes = blob_bytes
        self.buffers = budget_bytes // blob_bytes
        self._lock = threading.Lock()
        self._arena = arena = mmap.mmap(-1, self.buffers * blob_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            arena.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # A kernel built without them.
        # Taken from the end: the first buffer first, and then always the one given back last.
        starts = range((self.buffers - 1) * blob_bytes, -1, -blob_bytes)
        self._idle = [memoryview(arena)[start : start + blob_bytes] for start in starts]
        self._taken: dict[int, memoryview] = {}
        self._is_closed = False

    @property
    def taken(self) -> int:
        """Buffers in use."""
        with self._lock:
            return len(self._taken)

    def memory(self) -> npt.NDArray[np.uint8]:
        """Return all of it, uint8 and flat, for registering."""
        return np.frombuffer(self._arena, np.uint8)

    def take(self) -> memoryview:
        """Take a writable buffer of ``blob_bytes`` bytes, to be given back.

        Raises CapacityError when none is free, or after :meth:`close`.
        """
        with self._lock:
            if not self._idle:
                raise CapacityError(f"no buffer for a chunk is free: {self.buffers} are in use", code="staging_full")
            # The one given back last is the likeliest to be in the processor's caches.
            buffer = self._idle.pop()
            self._taken[id(buffer)] = buffer
            return buffer

    def give_back(self, buffer: memoryview) -> None:
        """End the use of a buffer, the very object that :meth:`take` returned. Raises InvariantViolated for others."""
        with self._lock:
            if self._taken.pop(id(buffer), None) is None:
                raise InvariantViolated("a buffer was given back that was not taken")
            if not self._is_closed:
                self._idle.append(buffer)

    def close(self) -> None:
        """Release the memory; buffers in use follow when they are given back."""
        with self._lock:
            self._is_closed = True
            self._idle.clear()
