"""The disk's chunks of earlier runs: found in threads, reported to the scheduler once there is a pool for them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import islice

from services.storage.backends import ChunkEntry, ChunkKey
from services.storage.disk_tier import DiskTier
from services.storage.tier_events import TierEvents
from shared import logs
from shared.errors import ThermoclineError

AT_ONCE = 512  # Entries that the event loop takes over at a time.

BATCH_S = 60.0
"""Longest wait for one batch, a header each; a slower directory is left out."""

_log = logs.get_logger("storage")


class WarmStart:
    """The search of the disk. Orders are served meanwhile; their saves and drops win over found chunks.

    Owned by the event loop.
    """

    def __init__(self, disk: DiskTier, events: TierEvents) -> None:
        """Search ``disk``, and report through ``events``; ``is_over`` is set at the end of the first search."""
        self.is_over = asyncio.Event()
        self._disk = disk
        self._events = events
        self._searching = 0
        self._looked_through: dict[str, None] = {}

    def is_known(self, path: str) -> bool:
        """Return whether all chunks of a directory were found since it was last taken."""
        return path in self._looked_through

    async def scan(self) -> None:
        """Find all chunks on the disk, and keep within the quota.

        A directory that fails meanwhile is used as far as it was read.
        """
        backend = self._disk.backend
        self._begin()
        found = await asyncio.gather(*(self._find(path, backend.entries_in(path)) for path in backend.paths()))
        self._end()
        victims = await self._disk.shrink()
        self.is_over.set()
        self._tell(found, victims)
        await self._events.dropped(victims)

    async def take_back(self, path: str) -> bool:
        """Try again to use a directory that is left out; its chunks are found like the rest, and reported at once.

        Return whether it is in use. It may take as long as the directory hangs.
        """
        await self.is_over.wait()
        backend = self._disk.backend
        self._looked_through.pop(path, None)
        # Without a bound: the caller tries it once at a time.
        if not await self._disk.directories.run(path, lambda: backend.retake(path), is_urgent=False, timeout_s=None):
            return False
        self._begin()
        try:
            found = await self._find(path, backend.entries_in(path))
            if path not in backend.left_out:
                self._disk.returned(path)
        finally:
            self._end()
        victims = await self._disk.shrink()
        self._tell([found], victims)
        await self._events.dropped(victims)
        await self._events.listed(found)
        return path not in backend.left_out

    async def announce(self, geometry: bytes) -> None:
        """Report the chunks of a geometry, given by its digest, to the scheduler; there is a pool for them now."""
        await self.is_over.wait()
        await self._events.listed(self._disk.index.keys(geometry=geometry))

    async def _find(self, where: str, entries: Iterator[ChunkEntry]) -> list[ChunkKey]:
        found: list[ChunkKey] = []
        try:
            while batch := await self._disk.directories.run(
                where, lambda: list(islice(entries, AT_ONCE)), is_urgent=False, timeout_s=BATCH_S
            ):
                self._disk.found(batch)
                found += [entry.key for entry in batch]
            self._looked_through[where] = None
        except (ThermoclineError, OSError) as error:
            _log.warning("disk_not_listed", directory=where, found=len(found), reason=str(error))
        return found

    def _begin(self) -> None:
        if not self._searching:
            self._disk.index.search()
        self._searching += 1

    def _end(self) -> None:
        self._searching -= 1
        if not self._searching:
            self._disk.index.searched()

    def _tell(self, found: list[list[ChunkKey]], victims: tuple[ChunkKey, ...]) -> None:
        chunks = sum(map(len, found))
        if chunks:
            _log.info("disk_listed", chunks=chunks, nbytes=self._disk.index.nbytes, evicted=len(victims))
