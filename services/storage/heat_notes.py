"""Notes of the heat of chunks on the disk, so that hot chunks are not the coldest after a restart.

Uses since the last note are lost when a storage is killed.
"""

from __future__ import annotations

import asyncio

from services.storage.backends import ChunkKey
from services.storage.disk_tier import DiskTier
from services.storage.warm_start import WarmStart
from shared import logs
from shared.errors import TransportError

NOTE_EVERY_S = 300.0

NOTE_S = 60.0
"""Longest time for a note in one directory."""

_log = logs.get_logger("storage")


class HeatNotes:
    """Writes notes from time to time. Owned by the event loop; ``run`` works until it is cancelled."""

    def __init__(self, disk: DiskTier, warm_start: WarmStart) -> None:
        """Note the heats of ``disk``, in those directories that ``warm_start`` has searched through."""
        self._disk = disk
        self._warm_start = warm_start

    async def run(self) -> None:
        """Note from time to time until cancelled."""
        while True:
            await asyncio.sleep(NOTE_EVERY_S)
            await self.note()

    async def note(self) -> None:
        """Note now, except for directories whose chunks are not all found yet: there the last note is better."""
        paths = [path for path in self._disk.backend.paths() if self._warm_start.is_known(path)]
        heats, now_s = self._disk.index.heats(), self._disk.now_s()
        of_all = await asyncio.to_thread(heats, now_s)
        await asyncio.gather(*(self._note(path, of_all) for path in paths))

    async def _note(self, path: str, heats: dict[ChunkKey, float]) -> None:
        try:
            await self._disk.directories.run(
                path, lambda: self._disk.backend.keep_heats(path, heats), is_urgent=False, timeout_s=NOTE_S
            )
        except TransportError as error:
            _log.warning("heats_not_noted", directory=path, reason=error.message)
