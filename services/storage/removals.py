"""Files of chunks that the index has forgotten already, deleted behind everybody's back.

Nobody who reads waits for a deletion. Who writes waits when too many stand in line, so the disk holds more than its
quota by at most what fits in the line, and before it writes a chunk anew whose old file is just being deleted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from services.storage import measures
from services.storage.backends import ChunkKey
from services.storage.io_threads import IoThreads
from shared import logs
from shared.errors import ThermoclineError

MOST = 256  # Chunks that may stand in line.
AT_ONCE = 32  # Chunks that one call deletes.

_log = logs.get_logger("storage")


class Removals:
    """A bounded line of deletions, done by ``run``. Owned by the event loop.

    ``delete`` and, for a chunk that is bad, ``quarantine`` are called in I/O threads.
    """

    def __init__(
        self,
        threads: IoThreads,
        delete: Callable[[ChunkKey], object],
        quarantine: Callable[[ChunkKey], object],
        *,
        most: int = MOST,
    ) -> None:
        self._threads = threads
        self._delete = delete
        self._quarantine = quarantine
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
        """Put a chunk in line that turned out to be bad; never waits, since whoever read it has to go on."""
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
            batch = list(self._waiting.items())[:AT_ONCE]
            for key, _ in batch:
                del self._waiting[key]
                self._running[key] = None
            failed, reason = await self._threads.run(False, self._delete_all, batch)
            if failed:
                _log.warning("chunks_not_deleted", chunks=failed, reason=reason)
            self._running.clear()
            self._wake()
            measures.REMOVALS.set(len(self))

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _delete_all(self, batch: list[tuple[ChunkKey, bool]]) -> tuple[int, str]:
        """How many could not be deleted, and why the last could not."""
        count, reason = 0, ""
        for key, is_bad in batch:
            try:
                (self._quarantine if is_bad else self._delete)(key)
            except (ThermoclineError, OSError) as error:
                # The next start finds the file and counts it again.
                count, reason = count + 1, str(error)
        return count, reason
