"""Looks after what the tiers below host memory lack, now and then, whether or not anybody uses them.

Directories that are left out are tried again, those that fail are written to, and an object store that does not answer
is asked; so a fault is over soon after its cause is. Whether a tier is used meanwhile is for its health
(``core/tier_health.py``) and its breaker (``core/circuit_breaker.py``), and these are also what is told here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from services.storage.backends import Directories, RemoteBackend
from services.storage.disk_tier import DiskTier
from services.storage.reconciliation import Reconciliation
from services.storage.remote_tier import RemoteTier
from services.storage.warm_start import WarmStart
from shared.errors import ThermoclineError
from shared.sizes import size

LOOK_EVERY_S = 3.0

FIRST_LOOK_S = 2.0
"""A storage joins after its first look, so that it can say at once what it lacks, but waits no longer for a store."""

Fault = tuple[str, str, str]
"""What is missing, why, and the flag that asked for it."""


class TierWatch:
    """Owned by the event loop; ``run`` looks until it is cancelled."""

    def __init__(
        self,
        disk: DiskTier | None,
        warm_start: WarmStart | None,
        remote: RemoteTier | None,
        reconciliation: Reconciliation | None = None,
    ) -> None:
        self._disk = disk
        self._warm_start = warm_start
        self._remote = remote
        self._reconciliation = reconciliation
        self._room: int | None = None  # Bytes of the disk that chunks have or could have.
        self._asking: asyncio.Task[None] | None = None

    async def first_look(self) -> None:
        """Look once, for ``FIRST_LOOK_S`` at the most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOK_S):
                await self._measure_room()
                await asyncio.shield(self._ask())

    async def run(self) -> None:
        """Look for ever."""
        try:
            while True:
                await asyncio.sleep(LOOK_EVERY_S)
                await self.look()
        finally:
            if self._asking is not None:
                self._asking.cancel()

    async def look(self) -> None:
        """Look once."""
        await self._mend_disk()
        await self._measure_room()
        await self._ask()

    def faults(self) -> Iterator[Fault]:
        """What the tiers lack now."""
        if self._disk is not None:
            yield from self._disk_faults(self._disk)
        if self._remote is not None and (fault := self._remote.backend.fault):
            yield "remote", fault, "--remote"

    def _disk_faults(self, disk: DiskTier) -> Iterator[Fault]:
        backend = disk.backend
        directories = {**backend.left_out, **backend.failing} if isinstance(backend, Directories) else {}
        for reason in directories.values():
            yield "disk", reason, "--disk-dir"
        if not directories and disk.fault:
            yield "disk", disk.fault, "--disk-dir"
        if disk.is_full:
            yield "disk", "its file system is full, so nothing new is saved there", "--disk-kv-bytes"
        elif self._room is not None and self._room < disk.index.quota:
            wanted, room = size(disk.index.quota), size(self._room)
            yield "quota", f"{wanted} are wanted on disk, and there is room for {room}", "--disk-kv-bytes"

    async def _mend_disk(self) -> None:
        disk, backend = self._disk, self._disk.backend if self._disk is not None else None
        if disk is None or not isinstance(backend, Directories):
            return
        left_out = len(backend.left_out)
        if left_out and self._warm_start is not None:
            await self._warm_start.add(backend.retake())
            if len(backend.left_out) < left_out:
                disk.works()
                if self._reconciliation is not None:
                    self._reconciliation.want()
        is_due = bool(disk.fault) and disk.may_try()
        if is_due or backend.failing:
            is_sound = await asyncio.to_thread(backend.probe)
            if is_due and is_sound:
                disk.works()

    async def _measure_room(self) -> None:
        disk, backend = self._disk, self._disk.backend if self._disk is not None else None
        if disk is None or not isinstance(backend, Directories) or backend.left_out:
            self._room = None
            return
        try:
            free = await asyncio.to_thread(backend.free_bytes)
        except OSError:
            self._room = None  # A directory that cannot be asked fails, and says so itself.
            return
        self._room = free + disk.index.nbytes
        disk.has_room(free)

    async def _ask(self) -> None:
        """Ask a store that does not answer; one question at a time, for as long as the store may take."""
        if self._remote is None or not self._remote.backend.fault:
            return
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(_probe(self._remote.backend))
        await self._asking


async def _probe(backend: RemoteBackend) -> None:
    with contextlib.suppress(ThermoclineError):  # The backend keeps the reason, and logs when it changes.
        await asyncio.to_thread(backend.probe)
