"""Repair of the tiers below host memory at intervals, whether or not they are used.

Directories that are left out are tried again, those in use are compared with what was opened, those that fail are
written to, and an object store that does not answer is asked; so a fault is over soon after its cause is. Whether a
tier is used meanwhile is decided by its health (``core/tier_health.py``) and its breaker (``core/circuit_breaker.py``),
whose faults are also reported here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from typing import Any

from services.storage.backends import RemoteBackend
from services.storage.disk_tier import DiskTier
from services.storage.reconciliation import Reconciliation
from services.storage.remote_tier import RemoteTier
from services.storage.tier_events import TierEvents
from services.storage.warm_start import WarmStart
from shared.errors import ThermoclineError
from shared.sizes import size

LOOK_EVERY_S = 3.0

FIRST_LOOK_S = 2.0
"""Longest first look. A storage joins after it, so that it can report faults at once, but waits no longer for a store.
"""

ERRAND_S = 2.0
"""Longest wait of a look for directories that hang."""

PROBE_S = 30.0
ROOM = "the room on disk"

Fault = tuple[str, str, str]
"""(what is missing, why, the flag that asked for it)."""


class TierWatch:
    """Looks at the tiers. Owned by the event loop; ``run`` works until it is cancelled."""

    def __init__(
        self,
        disk: DiskTier | None,
        warm_start: WarmStart | None,
        remote: RemoteTier | None,
        events: TierEvents | None = None,
        reconciliation: Reconciliation | None = None,
    ) -> None:
        """Prepare; ``events`` report to the scheduler the chunks that are away with their directory."""
        self._events = events
        self._disk = disk
        self._warm_start = warm_start
        self._remote = remote
        self._reconciliation = reconciliation
        self._room: int | None = None  # Bytes of the disk that chunks use or could use.
        self._asking: asyncio.Task[None] | None = None
        self._errands: dict[str, asyncio.Task[None]] = {}  # Running errands by name.

    async def first_look(self) -> None:
        """Look once, for ``FIRST_LOOK_S`` at the most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOK_S):
                await self._measure_room()
                await asyncio.shield(self._ask())

    async def run(self) -> None:
        """Look at intervals until cancelled, and at once where a directory was left out."""
        try:
            while True:
                await self._pause()
                await self.look()
        finally:
            for task in [*self._errands.values(), *([self._asking] if self._asking is not None else [])]:
                task.cancel()

    async def _pause(self) -> None:
        if self._disk is None:
            await asyncio.sleep(LOOK_EVERY_S)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_EVERY_S):
                await self._disk.directories.has_left.wait()

    async def look(self) -> None:
        """Look at all tiers once."""
        await self._mend_disk()
        await self._measure_room()
        await self._ask()

    def faults(self) -> Iterator[Fault]:
        """Yield the present faults of the tiers."""
        if self._disk is not None:
            yield from self._disk_faults(self._disk)
        if self._remote is not None and (fault := self._remote.backend.fault):
            yield "remote", fault, "--remote"

    def _disk_faults(self, disk: DiskTier) -> Iterator[Fault]:
        backend = disk.backend
        directories = {**backend.left_out, **backend.failing}
        for reason in directories.values():
            yield "disk", reason, "--disk-dir"
        if not directories and disk.fault:
            yield "disk", disk.fault, "--disk-dir"
        if disk.full:
            yield "disk", f"nothing new is saved there: {disk.full}", "--disk-kv-bytes"
        elif self._room is not None and self._room < disk.index.quota:
            wanted, room = size(disk.index.quota), size(self._room)
            yield "quota", f"{wanted} are wanted on disk, and there is room for {room}", "--disk-kv-bytes"

    async def _mend_disk(self) -> None:
        disk = self._disk
        if disk is None:
            return
        backend = disk.backend
        left = disk.directories.take_left()
        if left and self._events is not None:
            await self._events.dropped(left)
        await disk.delete_again()
        is_due = bool(disk.fault) and disk.may_try()
        # A directory left out just now has not recovered yet.
        for path in [] if left else list(backend.left_out):
            self._begin(path, self._take_back(disk, path))
        for path in backend.paths():
            self._begin(path, self._examine(disk, path, is_probed=is_due or path in backend.failing))
        await self._begun()
        if is_due and backend.paths() and not backend.failing:
            disk.works()

    async def _take_back(self, disk: DiskTier, path: str) -> None:
        if self._warm_start is not None and await self._warm_start.take_back(path):
            disk.works()
            if self._reconciliation is not None:
                self._reconciliation.want()

    async def _examine(self, disk: DiskTier, path: str, *, is_probed: bool) -> None:
        await disk.directories.check(path)
        if is_probed:
            await self._probe(disk, path)

    async def _probe(self, disk: DiskTier, path: str) -> None:
        await disk.directories.run(path, lambda: disk.backend.probe(path), is_urgent=False, timeout_s=PROBE_S)

    async def _measure_room(self) -> None:
        self._room = None
        if self._disk is not None and not self._disk.backend.left_out:
            self._begin(ROOM, self._find_room(self._disk))
            await self._begun()

    async def _find_room(self, disk: DiskTier) -> None:
        free = await asyncio.to_thread(disk.backend.free_bytes)
        self._room = free + disk.index.nbytes
        disk.has_room(free)

    def _begin(self, name: str, errand: Coroutine[Any, Any, None]) -> None:
        """Begin an errand that may take as long as a directory hangs, unless the last one of its name goes on."""
        if name in self._errands:
            errand.close()
            return
        task = asyncio.create_task(self._do(errand), name=f"look after {name}")
        self._errands[name] = task
        task.add_done_callback(lambda _: self._errands.pop(name, None))

    async def _do(self, errand: Coroutine[Any, Any, None]) -> None:
        with contextlib.suppress(ThermoclineError, OSError):  # Failures are logged where they occur, and tried again.
            await errand

    async def _begun(self) -> None:
        """Wait for the errands, for ``ERRAND_S`` at the most."""
        if self._errands:
            await asyncio.wait(list(self._errands.values()), timeout=ERRAND_S)

    async def _ask(self) -> None:
        """Probe a store that does not answer; one probe at a time, for as long as the store may take."""
        if self._remote is None or not self._remote.backend.fault:
            return
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(_probe(self._remote.backend))
        await self._asking


async def _probe(backend: RemoteBackend) -> None:
    with contextlib.suppress(ThermoclineError):  # The backend keeps the reason, and logs when it changes.
        await asyncio.to_thread(backend.probe)
