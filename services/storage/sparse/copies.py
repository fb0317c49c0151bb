"""Makes sparse copies of chunks of KV, and writes them behind their chunks.

A copy is made of pages that are in memory anyway while they are saved, and is written once its chunk is durable on the
disk. It runs in the background: without free memory for copies, or if the disk refuses it, the chunk has no copy. The
scheduler is told of written copies in batches.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

import numpy as np

from services.storage import measures
from services.storage.backends import ChunkKey
from services.storage.chunk_format import ChunkHeader, payload_view
from services.storage.chunk_keys import ChunkKeys
from services.storage.core.chunk_index import Arrival
from services.storage.core.save_check import key_above
from services.storage.disk_tier import DiskTier
from services.storage.io_threads import IoThreads
from services.storage.sparse.chunk_turns import ChunkTurns
from services.storage.sparse.format import SparseHeader
from services.storage.sparse.layout import SparseLayout
from services.storage.sparse.making import complete, copy_pages
from services.storage.sparse.opened_heads import OpenedHeads
from services.storage.sparse.unit_sealing import check_key_id
from services.storage.staging import Staging
from services.storage.tier_events import TierEvents
from shared import logs
from shared.errors import CapacityError

TOLD_AT_ONCE = 64
"""Most copies that one event announces to the scheduler."""

_log = logs.get_logger("storage")


@dataclass(slots=True)
class SparseCopy:
    """A copy being made or written, in a buffer of its own."""

    arrival: Arrival
    header: SparseHeader
    buffer: memoryview
    is_void: bool = False  # Its namespace was dropped since it was begun.

    @property
    def blob(self) -> memoryview:
        """The part of the buffer that the copy takes."""
        return self.buffer[: self.header.blob_bytes]


class SparseCopies:
    """The writer of sparse copies, owned by the event loop; ``run`` ends after :meth:`stop`."""

    def __init__(
        self,
        layout: SparseLayout,
        disk: DiskTier,
        *,
        staging: Staging,
        turns: ChunkTurns,
        heads: OpenedHeads,
        threads: IoThreads,
        keys: ChunkKeys,
        events: TierEvents,
    ) -> None:
        """Make copies in ``layout`` and write them to ``disk``; none is written before :meth:`run`.

        ``staging`` bounds the copies in memory: each takes one of its buffers. ``turns`` and ``heads`` are shared with
        the reader: a copy is written in its turn, and its head is forgotten then. ``keys`` seals, ``events`` announces.
        None of these is closed here.
        """
        self.written = 0
        self.left_out = 0
        """Copies that were not written, for lack of memory or a failure of the disk."""
        self._layout = layout
        self._disk = disk
        self._staging = staging
        self._turns = turns
        self._heads = heads
        self._threads = threads
        self._keys = keys
        self._events = events
        self._under_way: dict[ChunkKey, SparseCopy] = {}
        self._waiting: deque[SparseCopy] = deque()
        self._told: list[ChunkKey] = []  # Written, or gone for what was written: the scheduler is to hear of it.
        self._telling = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._is_stopping = False

    def __len__(self) -> int:
        """Return the number of copies under way."""
        return len(self._under_way)

    def is_lacking(self, header: ChunkHeader) -> bool:
        """Return whether a chunk of KV has no copy, none is being made, and one may be."""
        key = self._layout.key(header.namespace, header.identity)
        is_there = key in self._under_way or key in self._disk or self._disk.index.is_arriving(key)
        return not (is_there or self._is_stopping)

    async def make(self, header: ChunkHeader, blob: memoryview, key_id: str, value: float = 0.0) -> SparseCopy | None:
        """Begin a copy of a chunk of KV whose ``blob`` is not sealed (yet), to be ended by :meth:`finish`.

        Return None if there is one already, no buffer is free, or :meth:`stop` was called. ``key_id`` names the key
        that seals it, ``value`` is as in the save. Raises KeyMissing.
        """
        if not self.is_lacking(header):
            return None
        key = self._layout.key(header.namespace, header.identity)
        check_key_id(key_id)
        sparse = SparseHeader.of(header, self._layout, key_id=key_id, cipher=self._keys.cipher)
        try:
            buffer = self._staging.take()
        except CapacityError:
            self._leave_out("no_memory")
            return None
        place = header.depth // self._layout.tokens
        above = key_above(header.namespace, header.parent, header.depth, self._layout.shape)
        copy = SparseCopy(Arrival(key, sparse.blob_bytes, place, above, value), sparse, buffer)
        self._under_way[key] = copy
        payload = payload_view(blob, self._layout.geometry)
        try:
            await self._threads.run(False, copy_pages, payload, copy.blob, self._layout, is_sealed=sparse.is_sealed)
        except BaseException:
            self._end(copy)
            raise
        return copy

    async def finish(self, copy: SparseCopy, *, is_kept: bool) -> None:
        """Have it written, if its chunk was kept; else give it up. Waits for nothing but its turn to say so."""
        if not is_kept or copy.is_void or self._is_stopping:
            self._end(copy)
            return
        async with self._changed:
            self._waiting.append(copy)
            self._changed.notify()

    def forget(self, namespace: str) -> None:
        """Chunks of a namespace ("" is all) are dropped: keep none that is under way."""
        for copy in self._under_way.values():
            if not namespace or copy.header.namespace == namespace:
                copy.is_void = True

    async def stop(self) -> None:
        """Begin no more; what is not being written is given up."""
        self._is_stopping = True
        async with self._changed:
            self._changed.notify_all()

    async def run(self) -> None:
        """Write until :meth:`stop`."""
        async with asyncio.TaskGroup() as group:
            # Half of what may run behind: saves, which the scheduler waits for, take turns with them.
            for _ in range(max(1, self._threads.shares.background_most // 2)):
                group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: bool(self._waiting or self._is_stopping))
            if not self._waiting:
                return
            copy = self._waiting.popleft()
            try:
                if not (copy.is_void or self._is_stopping):
                    await self._write(copy)
            except Exception as error:
                # Its chunk can be read as a whole; that it cannot be in part costs no answer.
                self._leave_out("failed")
                _log.warning("sparse_copy_not_written", chunk=copy.arrival.key.path, reason=str(error))
            finally:
                self._end(copy)
            if len(self._told) >= TOLD_AT_ONCE or not self._waiting:
                await self._tell()

    async def _write(self, copy: SparseCopy) -> None:
        key = copy.arrival.key
        mapping = np.arange(self._layout.tokens, dtype=np.uint32)
        await self._threads.run(False, complete, copy.blob, copy.header, mapping, self._keys.cipher)
        async with self._turns.writing(key):
            self._heads.forget(key)
            written = await self._disk.write(copy.arrival, copy.blob)
        self._told += [*written.victims, *([key] if written.outcome == "stored" else [])]
        measures.SPARSE_COPIES.labels(written.outcome).inc()
        self.written += written.outcome == "stored"
        self.left_out += written.outcome in ("no_room", "full", "failed")
        if copy.is_void:
            await self._disk.drop([key])

    async def _tell(self) -> None:
        """Say of each what the index says, in order, whichever task wrote it."""
        async with self._telling:
            told, self._told = self._told, []
            await self._events.dropped(told)
            await self._events.listed(told)

    def _leave_out(self, reason: str) -> None:
        measures.SPARSE_COPIES.labels(reason).inc()
        self.left_out += 1

    def _end(self, copy: SparseCopy) -> None:
        del self._under_way[copy.arrival.key]
        self._disk.directories.abandoned.when_free(copy.buffer, lambda: self._staging.give_back(copy.buffer))
