"""Carries out ``ReadSparse``: parts of many copies at once, verified, in the caller's memory.

A call waits for its turn among those who read the disk with exactly the bytes that it reads, blocks of the disk being
read whole. Its chunks go to the I/O threads in as many groups as there are threads, because handing over a few blocks
costs more than reading them does; those of one group lie in one directory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from services.storage.backends import ChunkKey
from services.storage.buffers import Buffers
from services.storage.chunk_keys import ChunkKeys
from services.storage.disk_tier import DiskTier
from services.storage.sparse.chunk_turns import ChunkTurns
from services.storage.sparse.layout import SparseLayout
from services.storage.sparse.opened_heads import OpenedHeads
from services.storage.sparse.part_reading import HeadReading, Opened, PartReading
from services.storage.sparse.read_check import Asked, check_read
from services.storage.sparse.read_plan import ChunkRead, plan_reads
from services.storage.sparse.unit_sealing import check_key_id
from services.storage.tier_events import TierEvents
from shared.errors import IntegrityError, InvalidRequest, NotFound, QueueFull, TransportError, Unavailable
from shared.messages.sparse_reads import ReadSparse

READ_S = 30.0
"""The longest that a call may take, its wait for a limited disk included."""

MAX_READS = 256
"""Calls that may run at once: far more than the layers that a node's workers can wait for."""

STOPPING = "the storage is stopping"

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class SparseReader:
    """The reader of one layout's copies, owned by the event loop."""

    def __init__(
        self,
        layout: SparseLayout,
        disk: DiskTier,
        *,
        buffers: Buffers,
        turns: ChunkTurns,
        heads: OpenedHeads,
        keys: ChunkKeys,
        events: TierEvents,
        at_once: int,
        gap_bytes: int = 0,
    ) -> None:
        """Prepare; ``buffers`` have room for a region and for a head.

        A call's items in one directory are read in at most ``at_once`` groups. ``gap_bytes`` is as in ``plan_reads``.
        """
        self.reads = 0
        """Number of calls that were carried out."""
        self.disk_bytes = 0
        """Bytes read from the disk for them."""
        self._layout = layout
        self._disk = disk
        self._buffers = buffers
        self._turns = turns
        self._heads = heads
        self._keys = keys
        self._events = events
        self._at_once = at_once
        self._gap_bytes = gap_bytes
        self._running = 0
        self._limits: list[asyncio.Timeout] = []
        self._is_idle = asyncio.Event()
        self._is_stopping = False

    def __len__(self) -> int:
        """Return the number of calls under way."""
        return self._running

    async def read(self, call: ReadSparse, into: memoryview) -> int:
        """Carry out ``call``; ``into`` is the ``call.nbytes`` bytes that it names.

        Returns the bytes read from the disk. Once it has returned or raised, also by being cancelled, nothing writes to
        ``into`` any more. Raises InvalidRequest for what cannot be asked; NotFound where the disk has no copy, or not
        any more; IntegrityError when one is bad (it is gone then); TransportError when the disk failed; KeyMissing;
        QueueFull; and Unavailable when it took too long, or this storage stops.
        """
        asked = check_read(call, self._layout)
        if into.nbytes != asked.nbytes or into.readonly:
            raise InvalidRequest(f"{into.nbytes} bytes of memory are not the {asked.nbytes} that can be written")
        key_id = self._keys.key_id(call.key_id)
        check_key_id(key_id)
        if self._is_stopping:
            raise Unavailable(STOPPING)
        if self._running >= MAX_READS:
            raise QueueFull(f"{MAX_READS} sparse reads run already")
        self._running += 1
        try:
            async with self._bounded(), self._turns.reading(asked.keys):
                return await self._read_held(asked, key_id, into)
        except (IntegrityError, NotFound, TransportError):
            # What is told is the index's word: those that are there are not named.
            await self._events.dropped(asked.keys)
            raise
        finally:
            self._running -= 1
            if not self._running:
                self._is_idle.set()

    async def stop(self) -> None:
        """Carry out no more calls, and cut off those under way; they have ended when this returns."""
        self._is_stopping = True
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0.0)
        if self._running:
            self._is_idle.clear()
            await self._is_idle.wait()

    @asynccontextmanager
    async def _bounded(self) -> AsyncIterator[None]:
        """Raise Unavailable in the middle of what takes too long, or when the storage stops."""
        try:
            async with asyncio.timeout(READ_S) as limit:
                self._limits.append(limit)
                try:
                    yield
                finally:
                    self._limits.remove(limit)
        except TimeoutError as error:
            raise Unavailable(STOPPING if self._is_stopping else "the disk has too much to do") from error

    async def _read_held(self, asked: Asked, key_id: str, into: memoryview) -> int:
        index = self._disk.index
        lacking = next((key for key in asked.keys if key not in index), None)
        if lacking is not None:
            raise NotFound(f"the disk has no sparse copy {lacking.path}")
        if asked.layer == 0:
            # A request reads all layers: one of them is its use of the copies.
            index.touch(asked.keys, asked.place, None, self._disk.now_s())
        for key in asked.keys:
            index.hold(key)
        try:
            return await self._read_all(asked, key_id, into)
        finally:
            for key in asked.keys:
                index.release(key)
                if key not in index:
                    self._heads.forget(key)

    async def _read_all(self, asked: Asked, key_id: str, into: memoryview) -> int:
        opened, nbytes = await self._open(asked.keys, key_id)
        inverses = [of_chunk.inverse for of_chunk in opened]
        reads = plan_reads(asked, inverses, self._layout, is_sealed=bool(key_id), gap_bytes=self._gap_bytes)
        cipher = self._keys.cipher

        async def read_group(where: str, group: Sequence[ChunkRead]) -> int:
            group_bytes = sum(read.nbytes for read in group)
            reading = PartReading(self._disk.backend, asked, group, opened, cipher, into)
            await self._disk.read_parts(where, group_bytes, self._buffers, reading)
            return group_bytes

        nbytes += sum(await self._in_groups(reads, lambda read: read.key, read_group))
        self.reads += 1
        self.disk_bytes += nbytes
        return nbytes

    async def _open(self, keys: Sequence[ChunkKey], key_id: str) -> tuple[list[Opened], int]:
        """Headers and tables of these, from memory or the disk, and the bytes read for them."""
        known = {key: self._heads.get(key, key_id) for key in keys}
        unknown = [key for key, opened in known.items() if opened is None]
        each = self._layout.header_bytes(is_sealed=bool(key_id))

        async def open_group(where: str, group: Sequence[ChunkKey]) -> dict[ChunkKey, Opened]:
            reading = HeadReading(self._disk.backend, group, self._layout, self._keys.cipher, key_id)
            await self._disk.read_parts(where, each * len(group), self._buffers, reading)
            return reading.opened

        found: dict[ChunkKey, Opened] = {key: opened for key, opened in known.items() if opened is not None}
        for opened_now in await self._in_groups(unknown, lambda key: key, open_group):
            for key, opened in opened_now.items():
                found[key] = opened
                self._heads.put(key, opened)
        return [found[key] for key in keys], each * len(unknown)

    async def _in_groups(
        self,
        items: Sequence[ItemT],
        key_of: Callable[[ItemT], ChunkKey],
        work: Callable[[str, Sequence[ItemT]], Awaitable[ResultT]],
    ) -> list[ResultT]:
        """Run ``work`` on a directory and some items that lie in it, all groups at once.

        All have ended when this returns or raises.
        """
        by_directory: dict[str, list[ItemT]] = {}
        for item in items:
            by_directory.setdefault(self._disk.directories.of(key_of(item)), []).append(item)
        size = max(1, -(-len(items) // self._at_once))
        groups = [
            (where, of_it[start : start + size])
            for where, of_it in by_directory.items()
            for start in range(0, len(of_it), size)
        ]
        results = await asyncio.gather(*(work(where, group) for where, group in groups), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if not isinstance(result, BaseException)]
