"""At most one change of a chunk at a time; changes of different chunks do not wait for one another."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from services.storage.backends import ChunkKey
from shared.errors import TransportError


class KeyLocks:
    """Locks that exist while they are held, so that there is no table of them to grow."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: set[ChunkKey] = set()
        self._is_closed = False

    @contextmanager
    def hold(self, key: ChunkKey, deadline_s: float) -> Iterator[None]:
        """Hold ``key``. Raises TransportError past ``deadline_s`` (``time.monotonic``) and after :meth:`close`."""
        with self._changed:
            is_free = self._changed.wait_for(
                lambda: self._is_closed or key not in self._held, timeout=max(0.0, deadline_s - time.monotonic())
            )
            if self._is_closed:
                raise TransportError("the tier is closed")
            if not is_free:
                raise TransportError(f"chunk {key.identity.hex()} was being changed for too long")
            self._held.add(key)
        try:
            yield
        finally:
            with self._changed:
                self._held.discard(key)
                self._changed.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Let nobody hold a key any more, and wait for those who do; False if that took too long. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._held, timeout=timeout_s)
