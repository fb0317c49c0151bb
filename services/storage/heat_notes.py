"""Notes what chunks of the disk are worth, so that after a restart those that were hot are not the coldest.

What was used since the last note is forgotten where a storage is killed.
"""

from __future__ import annotations

import asyncio

from services.storage.backends import ChunkKey, Directories
from services.storage.disk_tier import DiskTier
from services.storage.warm_start import WarmStart
from shared import logs
from shared.errors import TransportError

NOTE_EVERY_S = 300.0

NOTE_S = 60.0
"""Longest that a directory may take for it."""

_log = logs.get_logger("storage")


class HeatNotes:
    """Owned by the event loop; ``run`` notes until it is cancelled."""

    def __init__(self, disk: DiskTier, warm_start: WarmStart) -> None:
        self._disk = disk
        self._warm_start = warm_start

    async def run(self) -> None:
        """Note now and then, for ever."""
        while True:
            await asyncio.sleep(NOTE_EVERY_S)
            await self.note()

    async def note(self) -> None:
        """Note now, but for directories in which not everything was found yet: there what was noted last is better."""
        backend = self._disk.backend
        if not isinstance(backend, Directories):
            return
        paths = [path for path in backend.paths() if self._warm_start.is_known(path)]
        heats, now_s = self._disk.index.heats(), self._disk.now_s()
        of_all = await asyncio.to_thread(heats, now_s)
        await asyncio.gather(*(self._note(backend, path, of_all) for path in paths))

    async def _note(self, backend: Directories, path: str, heats: dict[ChunkKey, float]) -> None:
        try:
            await self._disk.directories.run(
                path, lambda: backend.keep_heats(path, heats), is_urgent=False, timeout_s=NOTE_S
            )
        except TransportError as error:
            _log.warning("heats_not_noted", directory=path, reason=error.message)
