"""Files of chunks that the index has forgotten already, deleted in the background.

Reads do not wait for a deletion. A write waits when too many stand in line, so the disk holds more than its
quota by at most what fits in the line, and before it writes a chunk anew whose old file is just being deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice

from services.storage import measures
from services.storage.backends import ChunkKey
from shared import logs

MOST = 256  # Chunks that may stand in line.
AT_ONCE = 32  # Chunks that one call deletes.

_log = logs.get_logger("storage")


class Removals:
    """A bounded line of deletions, done by ``run``. Owned by the event loop.

    ``delete`` is given a few chunks, with whether each is bad, and returns what could not be deleted, and why.
    """

    def __init__(
        self, delete: Callable[[dict[ChunkKey, bool]], Awaitable[dict[ChunkKey, str]]], *, most: int = MOST
    ) -> None:
        self._delete = delete
        self._most = most
        self._waiting: dict[ChunkKey, bool] = {}  # Whether it is bad.
        self._running: dict[ChunkKey, None] = {}
        self._changed = asyncio.Event()
        self._is_stopping = False

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    async def add(self, keys: Iterable[ChunkKey]) -> None:
        """Put them in line; waits while it is full."""
        for key in keys:
            while len(self) >= self._most and not self._is_stopping:
                await self._changed.wait()
            self._waiting.setdefault(key, False)
            self._wake()

    def add_bad(self, key: ChunkKey) -> None:
        """Put a chunk in line that turned out to be bad; never waits, since its reader has to go on."""
        self._waiting[key] = True
        self._wake()

    async def settle(self, key: ChunkKey) -> None:
        """Its file is wanted again: take it out of the line, or wait until it is gone if that began or it is bad."""
        if self._waiting.get(key) is False:
            del self._waiting[key]
            self._wake()
        while key in self._running or key in self._waiting:
            await self._changed.wait()

    async def drained(self) -> None:
        """Wait until nothing is in line."""
        while len(self):
            await self._changed.wait()

    def stop(self) -> None:
        """Let :meth:`run` end once the line is empty."""
        self._is_stopping = True
        self._wake()

    async def run(self) -> None:
        """Delete what is in line until :meth:`stop`."""
        while True:
            while not self._waiting:
                if self._is_stopping:
                    return
                await self._changed.wait()
            batch = dict(islice(self._waiting.items(), AT_ONCE))
            for key in batch:
                del self._waiting[key]
                self._running[key] = None
            failed = await self._delete(batch)
            if failed:
                _log.warning("chunks_not_deleted", chunks=len(failed), reason=next(iter(failed.values())))
            self._running.clear()
            self._wake()
            measures.REMOVALS.set(len(self))

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
