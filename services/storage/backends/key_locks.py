"""At most one change of a chunk at a time; changes of different chunks do not wait for one another."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from services.storage.backends import ChunkKey
from shared.errors import TransportError


@dataclass(eq=False, slots=True)
class Holding:
    """One change under way. ``where`` it is made may be set later, and :meth:`KeyLocks.let_go` ends it there."""

    where: object = None


class KeyLocks:
    """Locks that exist while they are held, so that there is no table of them to grow."""

    def __init__(self) -> None:
        """Begin with no key held."""
        self._changed = threading.Condition()
        self._held: dict[ChunkKey, Holding] = {}
        self._is_closed = False

    @contextmanager
    def hold(self, key: ChunkKey, deadline_s: float, where: object = None) -> Iterator[Holding]:
        """Hold ``key``. Raises TransportError past ``deadline_s`` (``time.monotonic``) and after :meth:`close`."""
        holding = Holding(where)
        with self._changed:
            is_free = self._changed.wait_for(
                lambda: self._is_closed or key not in self._held, timeout=max(0.0, deadline_s - time.monotonic())
            )
            if self._is_closed:
                raise TransportError("the tier is closed")
            if not is_free:
                raise TransportError(f"chunk {key.identity.hex()} was being changed for too long")
            self._held[key] = holding
        try:
            yield holding
        finally:
            with self._changed:
                if self._held.get(key) is holding:
                    del self._held[key]
                self._changed.notify_all()

    def let_go(self, where: object) -> None:
        """Stop waiting for changes made at ``where``: they may hang."""
        with self._changed:
            self._held = {key: holding for key, holding in self._held.items() if holding.where is not where}
            self._changed.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Refuse new holders of a key, and wait for the others; return False if that took too long. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._held, timeout=timeout_s)
