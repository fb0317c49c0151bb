"""Execution of saves: each chunk from the pools to the disk, and on to the object store.

Each is answered with ``ChunksSaved``. A few chunks are under way at a time, in order of arrival; each holds one buffer
from the moment its pages are read to the moment it is durable. Its pages are free once they are read, and every other
wait comes after that.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from services.storage import measures
from services.storage.backends import REMOTE_WIDTH, ChunkKey
from services.storage.buffers import Buffers
from services.storage.chunk_keys import ChunkKeys
from services.storage.chunk_writing import gather_blob, seal, seal_for_upload
from services.storage.core.chunk_index import Arrival
from services.storage.core.save_check import NOWHERE, SaveChunk, host_pages_of
from services.storage.disk_tier import DiskTier
from services.storage.io_threads import IoThreads
from services.storage.page_gate import PageGate
from services.storage.pools import Pools
from services.storage.remote_tier import RemoteTier, Room
from services.storage.sparse.copies import SparseCopies
from services.storage.tier_events import TierEvents
from services.storage.uploads import Upload, Uploads
from shared import logs
from shared.chunks import chunk_tokens
from shared.errors import IntegrityError, InvalidRequest, ThermoclineError
from shared.messages.pools import ChunkForm
from shared.messages.storage_plans import SaveOrder, SaveTokens

_log = logs.get_logger("storage")


@dataclass(slots=True)
class _Save:
    order: SaveOrder
    chunks: list[SaveChunk]
    tickets: list[int]  # Tickets of the reads of host pages, one a chunk.
    started_s: float
    begun: int = 0  # Chunks that are, or were, under way.
    ended: int = 0
    dropped: list[ChunkKey] = field(default_factory=list)
    nbytes: int = 0
    error: str = ""
    is_void: bool = False  # Whether its namespace was dropped after it was ordered.


@dataclass(slots=True)
class SaveTotals:
    """Counts since this process started."""

    saves: int = 0
    failed: int = 0
    chunks: int = 0
    nbytes: int = 0


class Saver:
    """Saves of chunks of one form; at most ``max_saves`` wait or run.

    Owned by the event loop; ``run`` ends after :meth:`stop`.
    """

    def __init__(
        self,
        *,
        form: ChunkForm,
        pools: Pools,
        gate: PageGate,
        disk: DiskTier | None,
        remote: RemoteTier | None,
        uploads: Uploads | None,
        buffers: Buffers,
        threads: IoThreads,
        keys: ChunkKeys,
        events: TierEvents,
        confirm: Callable[[], Awaitable[None]],
        copies: SparseCopies | None = None,
        max_saves: int,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare to save; chunks that reach the disk are given to ``copies`` as well, if there is one."""
        self.totals = SaveTotals()
        self._form = form
        self._pools = pools
        self._gate = gate
        self._disk = disk
        self._remote = remote
        self._uploads = uploads
        self._buffers = buffers
        self._threads = threads
        self._keys = keys
        self._events = events
        self._confirm = confirm
        self._copies = copies
        self._max_saves = max_saves
        self._clock_s = clock_s
        self._saves: dict[int, _Save] = {}
        self._waiting: deque[_Save] = deque()  # Saves with chunks that were not begun.
        self._changed = asyncio.Condition()
        self._stop_reason = ""

    def __len__(self) -> int:
        """Return the number of saves that wait or run."""
        return len(self._saves)

    async def add(self, order: SaveOrder) -> None:
        """Queue a save. An invalid one is answered at once; one with the id of a save under way, by that."""
        if order.save_id in self._saves:
            return
        try:
            chunks = self._pools.check_save(self._pools.whole_save(order))
        except ThermoclineError as error:
            await self._refuse(order.save_id, error.message)
            return
        if len(self._saves) >= self._max_saves or self._stop_reason:
            await self._refuse(order.save_id, self._stop_reason or f"{self._max_saves} saves wait or run already")
            return
        tickets = [self._gate.read_ordered(host_pages_of(chunk)) for chunk in chunks]
        save = _Save(order, chunks, tickets, self._clock_s())
        if self._disk is not None:
            run = [chunk.key for chunk in chunks]
            self._disk.index.touch(run, chunks[0].place, chunks[0].above, self._disk.now_s(), order.value)
        async with self._changed:
            self._saves[order.save_id] = save
            self._waiting.append(save)
            measures.SAVES.inc()
            self._changed.notify_all()

    def forget(self, namespace: str) -> None:
        """Discard earlier orders' chunks of a namespace ("" is all), which is dropped."""
        for save in self._saves.values():
            if not namespace or save.order.namespace == namespace:
                save.is_void = True

    async def stop(self, reason: str) -> None:
        """Begin no more chunks; those not begun are given up."""
        self._stop_reason = reason
        async with self._changed:
            self._changed.notify_all()

    async def run(self) -> None:
        """Save until :meth:`stop`, and until every save is answered."""
        async with asyncio.TaskGroup() as group:
            # One more than may use a thread at once: it reads pages while the others write. A store takes many at once.
            workers = self._threads.shares.background_most + 1 if self._disk is not None else REMOTE_WIDTH
            for _ in range(workers):
                group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: bool(self._waiting or self._stop_reason))
                if not self._waiting:
                    return
                save = self._waiting[0]
                place = save.begun
                save.begun += 1
                if save.begun == len(save.chunks):
                    self._waiting.popleft()
            try:
                await self._save_chunk(save, save.chunks[place], save.tickets[place])
            except Exception as error:
                # One bad chunk must not end the others.
                self._note_failure(save, error)
            finally:
                self._gate.read_over(save.tickets[place])
            save.ended += 1
            if save.ended == len(save.chunks):
                await self._answer(save)

    def _note_failure(self, save: _Save, error: Exception) -> None:
        known = isinstance(error, ThermoclineError)
        if isinstance(error, IntegrityError):
            measures.BAD_CHUNKS.labels("pool", error.code).inc()
        if not save.error or not known:
            _log.warning("chunk_not_saved", save=save.order.save_id, reason=str(error), exc_info=not known)
        save.error = str(error) or type(error).__name__

    async def _save_chunk(self, save: _Save, chunk: SaveChunk, ticket: int) -> None:
        if self._stop_reason or save.is_void:
            save.error = self._stop_reason or "its namespace was dropped"
            return
        if self._disk is not None and (chunk.key in self._disk or self._disk.index.is_arriving(chunk.key)):
            return
        if self._disk is not None or self._remote is None:
            await self._bring_down(save, chunk, ticket)
            return
        # Requested before any wait, so that chunks of a prefix get room in their order.
        async with self._remote.room(chunk.key.namespace, self._buffers.blob_bytes) as room:
            if room.error:
                save.error = room.error
            else:
                await self._bring_down(save, chunk, ticket, room)

    async def _bring_down(self, save: _Save, chunk: SaveChunk, ticket: int, room: Room | None = None) -> None:
        """Bring a chunk from the pools to the tiers; ``room`` was taken for it in the object store."""
        async with self._buffers.buffer(is_urgent=False) as buffer:
            host = self._pools.pool(self._form)
            blob = buffer[: self._buffers.blob_bytes]
            is_device_read = bool((chunk.host_pages == NOWHERE).any())
            worker = (save.order.worker_id, save.order.worker_incarnation)
            device = self._pools.device(*worker) if is_device_read else None
            depth = chunk.place * chunk_tokens(host.geometry.page_size)
            header = await self._threads.run(False, gather_blob, chunk, save.order.namespace, depth, blob, host, device)
            self._gate.read_over(ticket)
            if is_device_read and self._pools.device(*worker) is not device:
                raise InvalidRequest("the device pool was replaced while it was read")
            if is_device_read:
                await self._confirm()  # See ``standing``. A replaced host page is recognised by its identity instead.
            key_id = self._keys.key_id(save.order.key_id)
            # The sparse copy is made of pages that are not sealed yet, and written only once they are durable.
            copy = None
            if self._copies is not None:
                copy = await self._copies.make(header, blob, key_id, save.order.value)
            is_kept = False
            try:
                digest = 0
                if self._disk is not None and self._remote is not None:
                    digest = await self._threads.run(False, seal_for_upload, blob, header, key_id, self._keys.cipher)
                else:
                    await self._threads.run(False, seal, blob, header, key_id, self._keys.cipher)
                is_kept = await self._keep(save, chunk, blob, digest, room)
            finally:
                if copy is not None and self._copies is not None:
                    await self._copies.finish(copy, is_kept=is_kept)

    async def _keep(self, save: _Save, chunk: SaveChunk, blob: memoryview, digest: int, room: Room | None) -> bool:
        """Write a chunk to the tiers; return whether it is on the disk now."""
        key, error = chunk.key, ""
        if self._disk is not None:
            arrival = Arrival(key, blob.nbytes, chunk.place, chunk.above, save.order.value)
            written = await self._disk.write(arrival, blob)
            save.dropped += written.victims
            if written.outcome in ("there", "arriving"):
                return False
            if written.outcome == "stored":
                save.nbytes += blob.nbytes
                self.totals.chunks += 1
                self.totals.nbytes += blob.nbytes
                if save.is_void:
                    save.dropped += await self._disk.drop([key])
                elif self._uploads is not None:
                    self._uploads.add(Upload(key, blob.nbytes, digest))
                return not save.is_void
            measures.CHUNKS_REFUSED.labels(written.outcome).inc()
            error = written.error or "the disk has no room for it"
        if self._remote is not None and not save.is_void:
            # A chunk that the disk refuses may still help readers of the store.
            error = await self._remote.write(key, blob, room)
        save.error = error or save.error
        return False

    async def _answer(self, save: _Save) -> None:
        del self._saves[save.order.save_id]
        measures.SAVES.dec()
        self.totals.saves += 1
        if self._remote is None and self._disk is not None and not save.error:
            # "" would say that all chunks are below, even those that other saves still bring, or that were evicted.
            lacking = sum(chunk.key not in self._disk for chunk in save.chunks)
            save.error = f"{lacking} of its chunks are not on the disk (yet, or any more)" if lacking else ""
        if save.error:
            self.totals.failed += 1
            measures.FAILURES.labels("SaveChunks").inc()
        await self._events.saved(
            save.order.save_id,
            form=self._form,
            chunks=[chunk.key for chunk in save.chunks],
            dropped=save.dropped,
            error=save.error,
            nbytes=save.nbytes,
            seconds=self._clock_s() - save.started_s,
            is_compact=isinstance(save.order, SaveTokens),
        )

    async def _refuse(self, save_id: int, reason: str) -> None:
        self.totals.saves += 1
        self.totals.failed += 1
        measures.FAILURES.labels("SaveChunks").inc()
        _log.warning("save_refused", save=save_id, reason=reason)
        await self._events.saved(save_id, form=self._form, error=reason)
