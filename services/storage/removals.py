"""Background deletion of files of chunks that the index has forgotten already.

Reads do not wait for a deletion. A write waits when too many deletions are queued, so the disk exceeds its quota by at
most the files in the queue; it also waits if the old file of its chunk is just being deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from itertools import islice

from services.storage import measures
from services.storage.backends import ChunkKey
from shared import logs

MOST = 256  # Most queued chunks.
AT_ONCE = 32  # Chunks that one call deletes.

_log = logs.get_logger("storage")


class Removals:
    """A bounded queue of deletions, done by ``run``. Owned by the event loop."""

    def __init__(
        self, delete: Callable[[dict[ChunkKey, bool]], Awaitable[dict[ChunkKey, str]]], *, most: int = MOST
    ) -> None:
        """Delete with ``delete``; :meth:`add` waits while ``most`` deletions wait or run.

        ``delete`` is given a few chunks, with whether each is bad, and returns those that could not be deleted, with
        the reason.
        """
        self._delete = delete
        self._most = most
        self._waiting: dict[ChunkKey, bool] = {}  # Whether each is bad.
        self._running: dict[ChunkKey, None] = {}
        self._told: dict[ChunkKey, None] = {}  # Those that failed, until they are deleted: each is logged once.
        self._changed = asyncio.Event()
        self._is_stopping = False

    def __len__(self) -> int:
        """Return the number of deletions that wait or run."""
        return len(self._waiting) + len(self._running)

    async def add(self, keys: Iterable[ChunkKey]) -> None:
        """Queue deletions; waits while the queue is full."""
        for key in keys:
            while len(self) >= self._most and not self._is_stopping:
                await self._changed.wait()
            self._waiting.setdefault(key, False)
            self._wake()

    def add_bad(self, key: ChunkKey) -> None:
        """Queue the deletion of a bad chunk; never waits, since its reader has to go on."""
        self._waiting[key] = True
        self._wake()

    async def settle(self, key: ChunkKey) -> None:
        """Take a chunk's file, which is wanted again, out of the queue.

        Waits until it is gone if its deletion began or it is bad.
        """
        if self._waiting.get(key) is False:
            del self._waiting[key]
            self._wake()
        while key in self._running or key in self._waiting:
            await self._changed.wait()

    async def drained(self) -> None:
        """Wait until the queue is empty."""
        while len(self):
            await self._changed.wait()

    def stop(self) -> None:
        """Let :meth:`run` end once the queue is empty."""
        self._is_stopping = True
        self._wake()

    async def run(self) -> None:
        """Delete queued files until :meth:`stop`."""
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
            news = [reason for key, reason in failed.items() if key not in self._told]
            if news:
                _log.warning("chunks_not_deleted", chunks=len(news), reason=news[0])
            for key in batch:
                self._told.pop(key, None)
            self._told |= dict.fromkeys(failed)
            self._running.clear()
            self._wake()
            measures.REMOVALS.set(len(self))

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
