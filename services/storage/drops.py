"""Deleting what a namespace has on disk and in the object store, one order after the other.

What was ordered before and is still on its way is given up too, so that nothing of it comes back afterwards.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

from services.storage.backends import ChunkBackend, ChunkEntry
from services.storage.disk_tier import DiskTier
from services.storage.io_threads import IoThreads
from services.storage.promotions import Promotions
from services.storage.remote_tier import RemoteTier
from services.storage.saver import Saver
from services.storage.sparse.copies import SparseCopies
from services.storage.tier_events import TierEvents
from services.storage.warm_start import WarmStart
from shared import logs
from shared.errors import QueueFull, ThermoclineError
from shared.messages.storage_plans import DropChunks

MAX_DROPS = 64
AT_ONCE = 32  # Objects that one call deletes.

_log = logs.get_logger("storage")


class Drops:
    """Owned by the event loop; ``run`` works until it is cancelled."""

    def __init__(
        self,
        *,
        disk: DiskTier | None,
        remote: RemoteTier | None,
        warm_start: WarmStart | None,
        threads: IoThreads,
        events: TierEvents,
    ) -> None:
        self._disk = disk
        self._remote = remote
        self._warm_start = warm_start
        self._threads = threads
        self._events = events
        self._waiting: deque[DropChunks] = deque()
        self._changed = asyncio.Event()
        self._is_dropping = False

    def __len__(self) -> int:
        """Drops that wait or run."""
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
        self._waiting.append(order)
        self._changed.set()

    async def run(self) -> None:
        """Drop what is in line, for ever."""
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
        count, seen = 0, AT_ONCE
        try:
            entries = remote.backend.entries(namespace)
            while seen == AT_ONCE:
                # A thread's turn for a few at a time: saves go on between.
                seen, deleted = await self._threads.run(False, _delete_some, remote.backend, entries, remote.timeout_s)
                count += deleted
        except (ThermoclineError, OSError) as error:
            _log.warning("chunks_not_dropped", tier="remote", namespace=namespace or "all", reason=str(error))
        _log.info("chunks_dropped", tier="remote", namespace=namespace or "all", chunks=count)


def _delete_some(backend: ChunkBackend, entries: Iterator[ChunkEntry], timeout_s: float) -> tuple[int, int]:
    """(chunks seen, chunks that were there). Raises TransportError when the store fails, with the rest still there."""
    some = list(islice(entries, AT_ONCE))
    return len(some), sum(backend.delete(entry.key, timeout_s=timeout_s) for entry in some)
