"""What the disk holds from earlier: learnt in a thread, told to the scheduler once there is a pool to load it to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import islice

from services.storage.backends import ChunkEntry, ChunkKey
from services.storage.disk_tier import DiskTier
from services.storage.tier_events import TierEvents
from shared import logs
from shared.errors import ThermoclineError

AT_ONCE = 512  # Entries that the event loop takes over in one go.

_log = logs.get_logger("storage")


class WarmStart:
    """Orders are served meanwhile; what they save or drop wins over what is found."""

    def __init__(self, disk: DiskTier, events: TierEvents) -> None:
        self.is_over = asyncio.Event()
        self._disk = disk
        self._events = events

    async def scan(self) -> None:
        """Find everything that the disk holds, and keep within the quota. A disk that fails on the way is used as far
        as it was read.
        """
        entries = self._disk.backend.entries()
        found = 0
        try:
            while batch := await asyncio.to_thread(_next, entries):
                self._disk.found(batch)
                found += len(batch)
        except (ThermoclineError, OSError) as error:
            _log.warning("disk_not_listed", found=found, reason=str(error))
        victims = await self._disk.shrink()
        self.is_over.set()
        _log.info("disk_listed", chunks=found, nbytes=self._disk.index.nbytes, evicted=len(victims))
        await self._events.dropped(victims)

    async def add(self, entries: Iterator[ChunkEntry]) -> None:
        """What directories hold that can be used only now: learnt like the rest, and told at once."""
        await self.is_over.wait()
        found: list[ChunkKey] = []
        try:
            while batch := await asyncio.to_thread(_next, entries):
                self._disk.found(batch)
                found += [key for key, _ in batch]
        except (ThermoclineError, OSError) as error:
            _log.warning("disk_not_listed", found=len(found), reason=str(error))
        if not found:
            return
        victims = await self._disk.shrink()
        _log.info("disk_listed", chunks=len(found), nbytes=self._disk.index.nbytes, evicted=len(victims))
        await self._events.dropped(victims)
        await self._events.listed(found)

    async def announce(self, geometry: bytes) -> None:
        """Tell the scheduler of the chunks of a geometry, given by its digest, for which there is a pool now."""
        await self.is_over.wait()
        await self._events.listed(self._disk.index.keys(geometry=geometry))


def _next(entries: Iterator[ChunkEntry]) -> list[tuple[ChunkKey, int]]:
    return [(entry.key, entry.nbytes) for entry in islice(entries, AT_ONCE)]
