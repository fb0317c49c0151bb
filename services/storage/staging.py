"""Memory for chunks on their way to or from a tier: a bounded number of buffers that begin on a block.

They are cut from one anonymous mapping, so they begin on a block, which is what O_DIRECT asks for; huge pages make a
chunk a few pieces for the disk instead of hundreds. Memory is taken when a buffer is first used, and those that were
used are used again first, so that a chunk costs no page faults. A buffer holds what was in it before, perhaps of
another tenant: its next user overwrites all of it or uses only what was read into it.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from services.storage.backends import BLOCK_BYTES
from shared.errors import CapacityError, ConfigError, InvariantViolated


class Staging:
    """Buffers of ``blob_bytes`` bytes each, as many as ``budget_bytes`` pay for. All calls may come from any thread."""

    def __init__(self, budget_bytes: int, blob_bytes: int) -> None:
        """Plan the buffers. Raises ConfigError if not even one buffer fits. Memory is taken when it is first
        needed.
        """
        if blob_bytes < 1 or blob_bytes % BLOCK_BYTES:
            raise InvariantViolated(f"a buffer of {blob_bytes} bytes is not whole blocks")
        if budget_bytes < blob_bytes:
            raise ConfigError(
                f"{budget_bytes} bytes hold no chunk of {blob_bytes} bytes on its way: raise --staging-bytes"
            )
        self.blob_bytes = blob_bytes
        self.buffers = budget_bytes // blob_bytes
        self._changed = threading.Condition()
        self._arena = arena = mmap.mmap(-1, self.buffers * blob_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            arena.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # A kernel built without them.
        # Taken from the end: the first buffer first, and then always the last that came back.
        starts = range((self.buffers - 1) * blob_bytes, -1, -blob_bytes)
        self._idle = [memoryview(arena)[start : start + blob_bytes] for start in starts]
        self._taken: dict[int, memoryview] = {}
        self._is_closed = False

    @property
    def taken(self) -> int:
        """Buffers in use."""
        with self._changed:
            return len(self._taken)

    def memory(self) -> npt.NDArray[np.uint8]:
        """All of it, uint8 and flat: for registering."""
        return np.frombuffer(self._arena, np.uint8)

    def take(self, *, timeout_s: float) -> memoryview:
        """Take a writable buffer of ``blob_bytes`` bytes, to be given back.

        Blocks up to ``timeout_s``; raises CapacityError when none came free, or after :meth:`close`.
        """
        with self._changed:
            is_free = self._changed.wait_for(
                lambda: self._is_closed or len(self._taken) < self.buffers, timeout=timeout_s
            )
            if self._is_closed or not is_free:
                raise CapacityError(f"no buffer for a chunk came free: {self.buffers} are in use", code="staging_full")
            # The last given back is the likeliest to be in the processor's caches.
            buffer = self._idle.pop()
            self._taken[id(buffer)] = buffer
            return buffer

    def give_back(self, buffer: memoryview) -> None:
        """End the use of a buffer, the very object that :meth:`take` returned. Raises InvariantViolated for others."""
        with self._changed:
            if self._taken.pop(id(buffer), None) is None:
                raise InvariantViolated("a buffer was given back that was not taken")
            if not self._is_closed:
                self._idle.append(buffer)
            self._changed.notify()

    @contextmanager
    def buffer(self, *, timeout_s: float) -> Iterator[memoryview]:
        """:meth:`take`, and give back at the end whatever happens."""
        taken = self.take(timeout_s=timeout_s)
        try:
            yield taken
        finally:
            self.give_back(taken)

    def close(self) -> None:
        """Let go of the memory; buffers in use go when they are given back. Who waits gets CapacityError."""
        with self._changed:
            self._is_closed = True
            self._idle.clear()
            self._changed.notify_all()
