"""Locks of sparse copies: many readers, or one writer, of each.

A reader trusts the tables that it read before, so the file must not change under it. Files are replaced by renaming,
and no byte is ever torn; it is old tables and new units that this keeps apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from services.storage.backends import ChunkKey


class ChunkTurns:
    """Read and write locks by copy, held in memory while they are used. Owned by the event loop.

    A waiting writer goes before later readers, so that a copy that is read all the time can be written.
    """

    def __init__(self) -> None:
        """Begin with no copy that is read or written."""
        self._readers: dict[ChunkKey, int] = {}
        self._writers: dict[ChunkKey, int] = {}  # That write or wait to.
        self._writing: dict[ChunkKey, None] = {}
        self._changed = asyncio.Event()

    def is_idle(self, key: ChunkKey) -> bool:
        """Whether it is neither read nor written now."""
        return key not in self._readers and key not in self._writing

    @asynccontextmanager
    async def reading(self, keys: Iterable[ChunkKey]) -> AsyncIterator[None]:
        """Wait until none of these, each named once, is written or about to be, and hold off writers."""
        keys = list(keys)
        while any(key in self._writers for key in keys):
            await self._changed.wait()
        for key in keys:
            self._readers[key] = self._readers.get(key, 0) + 1
        try:
            yield
        finally:
            for key in keys:
                _count_down(self._readers, key)
            self._wake()

    @asynccontextmanager
    async def writing(self, key: ChunkKey) -> AsyncIterator[None]:
        """Wait until its readers and writers have ended, and hold off others."""
        self._writers[key] = self._writers.get(key, 0) + 1
        try:
            while not self.is_idle(key):
                await self._changed.wait()
            self._writing[key] = None
            try:
                yield
            finally:
                del self._writing[key]
        finally:
            _count_down(self._writers, key)
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _count_down(counts: dict[ChunkKey, int], key: ChunkKey) -> None:
    left = counts.pop(key) - 1
    if left:
        counts[key] = left
