"""Deletion of a namespace's chunks on disk and in the object store, one order after the other.

Earlier orders that are still in flight are given up too, so that nothing of them comes back afterwards. What the object
store does not delete is tried a few times, and is a fault of this storage then.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import islice

from services.storage.backends import ChunkEntry, ChunkKey
from services.storage.disk_tier import DiskTier
from services.storage.io_threads import IoThreads
from services.storage.promotions import Promotions
from services.storage.reconciliation import Reconciliation
from services.storage.remote_tier import RemoteTier
from services.storage.saver import Saver
from services.storage.sparse.copies import SparseCopies
from services.storage.tier_events import TierEvents
from services.storage.tier_watch import Fault
from services.storage.uploads import Uploads
from services.storage.warm_start import WarmStart
from shared import logs
from shared.errors import QueueFull, ThermoclineError
from shared.messages.storage_plans import DropChunks

MAX_DROPS = 64
AT_ONCE = 256
"""Objects that one call deletes: as many as Azure takes in a request, and few enough for stores that take one."""

PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Pauses before an incomplete deletion from the object store is tried again; longer than its breaker is open."""

_log = logs.get_logger("storage")


class Drops:
    """Queued drops. Owned by the event loop; ``run`` works until it is cancelled."""

    def __init__(
        self,
        *,
        disk: DiskTier | None,
        remote: RemoteTier | None,
        uploads: Uploads | None,
        reconciliation: Reconciliation | None,
        warm_start: WarmStart | None,
        threads: IoThreads,
        events: TierEvents,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """Delete from the tiers that are given; None is a tier or a part that this storage lacks.

        The parts are run and closed by their owner. ``threads`` runs the listings of the object store, ``events``
        reports the chunks that are gone from the disk. ``sleep`` is an argument for tests.
        """
        self._disk = disk
        self._remote = remote
        self._uploads = uploads
        self._reconciliation = reconciliation
        self._warm_start = warm_start
        self._threads = threads
        self._events = events
        self._waiting: deque[DropChunks] = deque()
        self._changed = asyncio.Event()
        self._is_dropping = False
        self._sleep = sleep
        self._incomplete: dict[str, str] = {}  # Reasons by namespace whose last drop from the store left something.

    def __len__(self) -> int:
        """Return the number of drops that wait or run."""
        return len(self._waiting) + self._is_dropping

    def add(
        self,
        order: DropChunks,
        savers: Iterable[Saver],
        promotions: Iterable[Promotions],
        copies: Iterable[SparseCopies] = (),
    ) -> None:
        """Queue a drop of chunks of every form. Raises QueueFull."""
        if len(self._waiting) >= MAX_DROPS:
            raise QueueFull(f"{MAX_DROPS} drops wait already")
        if "disk" in order.tiers:
            for saver in savers:
                saver.forget(order.namespace)
            for promotion in promotions:
                promotion.forget(order.namespace)
            for copied in copies:
                copied.forget(order.namespace)
        if "remote" in order.tiers and self._remote is not None:
            self._remote.forget(order.namespace)
            if self._uploads is not None:
                self._uploads.forget(order.namespace)
            if self._reconciliation is not None:
                self._reconciliation.forget(order.namespace)
        self._waiting.append(order)
        self._changed.set()

    def faults(self) -> Iterator[Fault]:
        """Yield drops that left chunks in the object store, until another one deletes them."""
        for reason in self._incomplete.values():
            yield "flush", reason, "--remote"

    async def run(self) -> None:
        """Carry out queued drops until cancelled."""
        while True:
            if not self._waiting:
                self._changed.clear()
                await self._changed.wait()
                continue
            order, self._is_dropping = self._waiting.popleft(), True
            await self._drop(order)
            self._is_dropping = False

    async def _drop(self, order: DropChunks) -> None:
        if "disk" in order.tiers and self._disk is not None:
            if self._warm_start is not None:
                await self._warm_start.is_over.wait()
            keys = self._disk.index.keys(namespace=order.namespace)
            gone = await self._disk.drop(keys)
            _log.info("chunks_dropped", tier="disk", namespace=order.namespace or "all", chunks=len(gone))
            await self._events.dropped(gone)
        if "remote" in order.tiers and self._remote is not None:
            await self._drop_remote(self._remote, order.namespace)

    async def _drop_remote(self, remote: RemoteTier, namespace: str) -> None:
        if self._uploads is not None:
            await self._uploads.ended(namespace)
        what, count, pauses = namespace or "all", 0, iter(PAUSES_S)
        while True:
            gone, reason = await self._delete(remote, namespace)
            count += gone
            pause_s = next(pauses, None)
            if not reason or pause_s is None:
                break
            await self._sleep(pause_s)
        if reason:
            _log.warning("chunks_not_dropped", tier="remote", namespace=what, chunks=count, reason=reason)
            self._incomplete[namespace] = f"{what}: {reason}"
            if len(self._incomplete) > MAX_DROPS:
                del self._incomplete[next(iter(self._incomplete))]
            return
        _log.info("chunks_dropped", tier="remote", namespace=what, chunks=count)
        self._incomplete.pop(namespace, None)
        if not namespace:
            self._incomplete.clear()

    async def _delete(self, remote: RemoteTier, namespace: str) -> tuple[int, str]:
        """Delete what the store lists; return how many chunks are gone, and why others are left, "" for none."""
        count, failures = 0, list[str]()
        entries = remote.backend.entries(namespace)
        try:
            # One thread's turn for each part, so that saves go on in between.
            while some := await self._threads.run(False, _next_some, entries):
                if await _fault(remote, some):
                    # Not all of them need be to blame.
                    found = [fault for key in some if (fault := await _fault(remote, [key]))]
                    count += len(some) - len(found)
                    failures += found
                else:
                    count += len(some)
        except (ThermoclineError, OSError) as error:
            return count, str(error)
        return count, f"{len(failures)} chunks are left: {failures[-1]}" if failures else ""


async def _fault(remote: RemoteTier, keys: list[ChunkKey]) -> str:
    """Delete chunks of the store; return why that failed, "" if it did not."""
    try:
        await remote.backend.remove(keys, timeout_s=remote.timeout_s)
    except (ThermoclineError, OSError) as error:
        return str(error) or type(error).__name__
    return ""


def _next_some(entries: Iterator[ChunkEntry]) -> list[ChunkKey]:
    """Return the next chunks to delete. Raises TransportError when the store fails, with the rest still there."""
    return [entry.key for entry in islice(entries, AT_ONCE)]
