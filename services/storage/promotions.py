"""Chunks that came from the object store, on their way to the disk: a few at a time, and the others not at all."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from services.storage import measures
from services.storage.backends import ChunkKey
from services.storage.buffers import Buffers
from services.storage.chunk_format import ChunkHeader
from services.storage.chunk_keys import ChunkKeys
from services.storage.chunk_writing import seal
from services.storage.core.chunk_index import Arrival
from services.storage.core.save_check import key_above
from services.storage.disk_tier import DiskTier
from services.storage.io_threads import IoThreads
from services.storage.sparse.copies import SparseCopies
from services.storage.tier_events import TierEvents
from shared import logs

_log = logs.get_logger("storage")


@dataclass(frozen=True, slots=True)
class Promotion:
    """A verified chunk in ``blob``, not sealed, and the urgent buffer that it is in, or is copied to."""

    key: ChunkKey
    place: int
    header: ChunkHeader
    blob: memoryview
    buffer: memoryview
    key_id: str


class Promotions:
    """Owned by the event loop."""

    def __init__(
        self,
        disk: DiskTier,
        buffers: Buffers,
        threads: IoThreads,
        keys: ChunkKeys,
        events: TierEvents,
        copies: SparseCopies | None = None,
    ) -> None:
        """Prepare to save; what comes to the disk is given to ``copies`` as well, where there are any."""
        self.promoted = 0
        self._disk = disk
        self._buffers = buffers
        self._threads = threads
        self._keys = keys
        self._events = events
        self._copies = copies
        self._most = threads.shares.background_most
        self._tasks: dict[ChunkKey, asyncio.Task[None]] = {}
        self._void: dict[ChunkKey, None] = {}  # Of those under way: dropped since.

    def __len__(self) -> int:
        """Promotions under way."""
        return len(self._tasks)

    def begin(self, promotion: Promotion) -> bool:
        """Take over the chunk and its buffer; False, and nothing is taken, if that would be one too many."""
        key = promotion.key
        if len(self._tasks) >= self._most or key in self._tasks or key in self._disk:
            measures.PROMOTIONS.labels("left_out").inc()
            return False
        self._tasks[key] = asyncio.create_task(self._promote(promotion))
        return True

    def forget(self, namespace: str) -> None:
        """Chunks of a namespace ("" is all) are dropped: keep none that is under way."""
        self._void |= {key: None for key in self._tasks if not namespace or key.namespace == namespace}

    async def ended(self) -> None:
        """Wait until none is under way."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _promote(self, promotion: Promotion) -> None:
        key, header = promotion.key, promotion.header
        blob = promotion.buffer[: header.nbytes]
        dropped: list[ChunkKey] = []
        outcome = "failed"
        copy = None
        try:
            if promotion.blob.obj is not blob.obj:
                # It is where it arrived, and is to be sealed, and written past the page cache.
                await self._threads.run(False, _copy, promotion.blob, blob)
            if self._copies is not None:
                copy = await self._copies.make(header, blob, promotion.key_id)
            await self._threads.run(False, seal, blob, header, promotion.key_id, self._keys.cipher)
            above = key_above(key.namespace, header.parent, header.depth, key.geometry)
            written = await self._disk.write(Arrival(key, blob.nbytes, promotion.place, above), blob)
            outcome = written.outcome
            dropped += written.victims
            if key in self._void:
                dropped += await self._disk.drop([key])
        except Exception as error:
            # The request that asked for it has it; the missing copy on the disk costs no answer.
            _log.warning("chunk_not_promoted", chunk=key.path, reason=str(error))
        finally:
            self._buffers.give_back(promotion.buffer, is_urgent=True)
            is_void = key in self._void
            self._void.pop(key, None)
            if copy is not None and self._copies is not None:
                await self._copies.finish(copy, is_kept=outcome == "stored" and not is_void)
        measures.PROMOTIONS.labels(outcome).inc()
        self.promoted += outcome == "stored"
        await self._events.dropped(dropped)
        await self._events.listed([key])
        del self._tasks[key]


def _copy(source: memoryview, target: memoryview) -> None:
    target[:] = source
