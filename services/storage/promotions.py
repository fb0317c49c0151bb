"""Promotions to the disk of chunks from the object store: a few at a time; beyond that chunks are not promoted."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from services.storage import measures
from services.storage.backends import ChunkKey
from services.storage.buffers import Buffers
from services.storage.chunk_format import Checksums, ChunkHeader
from services.storage.chunk_keys import ChunkKeys
from services.storage.chunk_writing import seal
from services.storage.core.chunk_index import Arrival
from services.storage.core.fetch_progress import Source
from services.storage.core.save_check import key_above
from services.storage.disk_tier import DiskTier
from services.storage.io_threads import IoThreads
from services.storage.sparse.copies import SparseCopies
from services.storage.tier_events import TierEvents
from shared import logs

_log = logs.get_logger("storage")


@dataclass(frozen=True, slots=True)
class Brought:
    """A verified chunk in ``blob``, not sealed, which need not be in its urgent ``buffer``.

    To be given back by :meth:`ChunkSource.finish`.
    """

    key: ChunkKey
    place: int
    source: Source
    header: ChunkHeader
    blob: memoryview
    buffer: memoryview
    key_id: str

    @property
    def nbytes(self) -> int:
        """Bytes of the blob."""
        return self.header.nbytes

    @property
    def checksums(self) -> Checksums:
        """Checksums of its pages, uint64 [pages, units]."""
        return self.header.checksums


class Promotions:
    """Promotions under way. Owned by the event loop."""

    def __init__(
        self,
        disk: DiskTier,
        buffers: Buffers,
        threads: IoThreads,
        keys: ChunkKeys,
        events: TierEvents,
        copies: SparseCopies | None = None,
    ) -> None:
        """Prepare; promoted chunks are given to ``copies`` as well, if there is one."""
        self.promoted = 0
        self._disk = disk
        self._buffers = buffers
        self._threads = threads
        self._keys = keys
        self._events = events
        self._copies = copies
        self._most = threads.shares.background_most
        self._tasks: dict[ChunkKey, asyncio.Task[None]] = {}
        self._void: dict[ChunkKey, None] = {}  # Chunks under way that were dropped meanwhile.

    def __len__(self) -> int:
        """Return the number of promotions under way."""
        return len(self._tasks)

    def begin(self, brought: Brought) -> bool:
        """Take over the chunk and its buffer; return False, with nothing taken, if too many are under way."""
        key = brought.key
        if len(self._tasks) >= self._most or key in self._tasks or key in self._disk:
            measures.PROMOTIONS.labels("left_out").inc()
            return False
        self._tasks[key] = asyncio.create_task(self._promote(brought))
        return True

    def forget(self, namespace: str) -> None:
        """Discard the promotions of a namespace ("" is all), which is dropped."""
        self._void |= {key: None for key in self._tasks if not namespace or key.namespace == namespace}

    async def ended(self) -> None:
        """Wait until no promotion is under way."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _promote(self, brought: Brought) -> None:
        key, header = brought.key, brought.header
        blob = brought.buffer[: header.nbytes]
        dropped: list[ChunkKey] = []
        outcome = "failed"
        copy = None
        try:
            if brought.blob.obj is not blob.obj:
                # The blob is where it arrived; sealing and writing past the page cache need the buffer.
                await self._threads.run(False, _copy, brought.blob, blob)
            if self._copies is not None:
                copy = await self._copies.make(header, blob, brought.key_id)
            await self._threads.run(False, seal, blob, header, brought.key_id, self._keys.cipher)
            above = key_above(key.namespace, header.parent, header.depth, key.geometry)
            written = await self._disk.write(Arrival(key, blob.nbytes, brought.place, above), blob)
            outcome = written.outcome
            dropped += written.victims
            if key in self._void:
                dropped += await self._disk.drop([key])
        except Exception as error:
            # The request already has the chunk; no answer depends on the copy on the disk.
            _log.warning("chunk_not_promoted", chunk=key.path, reason=str(error))
        finally:
            self._buffers.give_back(brought.buffer, is_urgent=True)
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
