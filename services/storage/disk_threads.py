"""Threads of their own for each directory of the disk, so that one that hangs holds no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from services.storage.abandoned import Abandoned
from services.storage.io_threads import IoThreads

R = TypeVar("R")


class DiskThreads:
    """``depth`` calls at once in all directories together, as long as each of them answers. Owned by the event loop."""

    def __init__(self, common: IoThreads, directories: int) -> None:
        """Divide the depth; a tier without ``directories`` uses the threads that are ``common`` to all."""
        self.abandoned = Abandoned()
        self._common = common
        self._depth = -(-common.shares.depth // max(1, directories))
        self._by_directory: dict[str, IoThreads] = {}

    async def run(
        self,
        where: str,
        function: Callable[[], R],
        *,
        is_urgent: bool,
        timeout_s: float | None,
        uses: Sequence[memoryview] = (),
    ) -> R:
        """Call ``function``, which works in a directory (or "", in none), in a thread when it is its turn.

        Cut off, or after ``timeout_s``, the call goes on by itself: ``uses`` are buffers that it writes or reads until
        then. Raises :class:`~services.storage.io_threads.Hung` in the second case, and TransportError for a directory
        that was left out before its turn came.
        """
        threads = self._common
        if where:
            threads = self._by_directory.get(where) or self._by_directory.setdefault(where, IoThreads(self._depth))
        return await threads.attempt(function, self.abandoned, is_urgent=is_urgent, timeout_s=timeout_s, uses=uses)

    def left(self, where: str, reason: str) -> None:
        """Leave out a directory: what waits for its threads fails, and when it is back it gets others."""
        threads = self._by_directory.pop(where, None)
        if threads is not None:
            threads.give_up(reason)

    def close(self) -> None:
        """Start no more calls; those under way end by themselves."""
        for threads in self._by_directory.values():
            threads.close()
