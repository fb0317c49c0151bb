"""The coroutines of a remote tier, for tests' tiers that only block."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from services.storage.backends import FRONT_BYTES, ChunkBackend, ChunkKey, IsStale, Stored


class RemoteCalls(ChunkBackend):
    """Each call runs the blocking ones in a thread."""

    @property
    def fault(self) -> str:
        """See :class:`~services.storage.backends.RemoteBackend`: it answers."""
        return ""

    def probe(self, *args: Any, **kwargs: Any) -> bool:
        """See :class:`~services.storage.backends.RemoteBackend` and :class:`~services.storage.backends.Directories`."""
        return True

    async def fetch(self, key: ChunkKey, most: int, *, timeout_s: float) -> memoryview | None:
        """See :class:`~services.storage.backends.RemoteBackend`."""
        into = memoryview(bytearray(most))
        nbytes = await asyncio.to_thread(self.get, key, into, timeout_s=timeout_s)
        return into[:nbytes] if nbytes else None

    async def store(self, key: ChunkKey, blob: bytes, is_stale: IsStale, *, timeout_s: float) -> Stored:
        """See :class:`~services.storage.backends.RemoteBackend`."""
        return await asyncio.to_thread(self._store, key, memoryview(blob), is_stale, timeout_s)

    async def sizes(self, keys: Sequence[ChunkKey]) -> list[int]:
        """See :class:`~services.storage.backends.RemoteBackend`."""
        held = await asyncio.to_thread(lambda: {entry.key: entry.nbytes for entry in self.entries()})
        return [held.get(key, 0) for key in keys]

    async def remove(self, keys: Sequence[ChunkKey], *, timeout_s: float) -> None:
        """See :class:`~services.storage.backends.RemoteBackend`."""
        for key in keys:
            await asyncio.to_thread(self.delete, key, timeout_s=timeout_s)

    def _store(self, key: ChunkKey, blob: memoryview, is_stale: IsStale, timeout_s: float) -> Stored:
        if self.put(key, blob, stripe=0, timeout_s=timeout_s):
            return "new"
        there = memoryview(bytearray(2 * blob.nbytes))
        nbytes = self.get(key, there, timeout_s=timeout_s)
        if nbytes == blob.nbytes and not is_stale(nbytes, bytes(there[:FRONT_BYTES])):
            return "there"
        self.delete(key, timeout_s=timeout_s)
        self.put(key, blob, stripe=0, timeout_s=timeout_s)
        return "replaced"
