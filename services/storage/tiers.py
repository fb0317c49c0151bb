"""The tiers below host memory, joined: what each order asks of them, and what runs behind.

The tiers are there from the start; the pipelines between them and the host pool are made when the pool is, because
the size of a buffer follows from its geometry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from services.storage import measures
from services.storage.buffers import Buffers
from services.storage.chunk_format import blob_nbytes
from services.storage.chunk_keys import ChunkKeys
from services.storage.chunk_source import ChunkSource
from services.storage.config import StorageConfig
from services.storage.core.fetch_progress import FetchProgress
from services.storage.disk_tier import DiskTier
from services.storage.drops import Drops
from services.storage.fetcher import Fetcher
from services.storage.io_threads import IoThreads
from services.storage.media import Media
from services.storage.page_gate import PageGate
from services.storage.pools import Pools
from services.storage.promotions import Promotions
from services.storage.remote_tier import RemoteTier
from services.storage.saver import Saver
from services.storage.scrubber import Scrubber
from services.storage.staging import Staging
from services.storage.tier_events import TierEvents
from services.storage.warm_start import WarmStart
from shared import logs
from shared.chunks import geometry_id
from shared.errors import ConfigError, InvalidRequest, QueueFull
from shared.event_outbox import EventOutbox
from shared.ids import DIGEST_BYTES, split_digests
from shared.messages.pools import KvGeometry
from shared.messages.status import ChunksVerified, VerifyChunks
from shared.messages.storage_plans import DropChunks, FetchChunks, PinChunks, SaveChunks

STOPPING = "the storage is stopping"

_log = logs.get_logger("storage")


@dataclass(frozen=True, slots=True)
class _Pipelines:
    buffers: Buffers
    saver: Saver
    fetcher: Fetcher
    promotions: Promotions | None
    scrubber: Scrubber | None


class Tiers:
    """Owned by the event loop; ``run`` ends after :meth:`stop`, when everything under way was answered."""

    def __init__(
        self,
        config: StorageConfig,
        media: Media,
        pools: Pools,
        gate: PageGate,
        outbox: EventOutbox,
        *,
        incarnation: str,
        confirm: Callable[[], Awaitable[None]],
    ) -> None:
        self._config = config
        self._pools = pools
        self._gate = gate
        self._confirm = confirm
        self._keys = ChunkKeys(media.cipher)
        self._threads = IoThreads(config.io_threads)
        self._disk = DiskTier(media.disk, config.disk_kv_bytes, self._threads) if media.disk else None
        self._remote = (
            RemoteTier(media.remote, self._threads, timeout_s=config.remote_timeout_ms / 1000) if media.remote else None
        )
        self._events = TierEvents(
            outbox,
            lambda key: self._disk is not None and key in self._disk,
            storage_id=config.id,
            incarnation=incarnation,
        )
        self._warm_start = WarmStart(self._disk, self._events) if self._disk else None
        self._drops = Drops(
            disk=self._disk,
            remote=self._remote,
            warm_start=self._warm_start,
            threads=self._threads,
            events=self._events,
        )
        self._pipelines: _Pipelines | None = None
        self._why_closed = "there is no host pool yet"
        self._stopping = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._endless: list[asyncio.Task[None]] = []
        self._saving: asyncio.Task[None] | None = None

    @property
    def disk_bytes(self) -> int:
        """Budget of the disk; 0 is none."""
        return self._disk.index.quota if self._disk else 0

    @property
    def has_remote(self) -> bool:
        return self._remote is not None

    def open(self, geometry: KvGeometry) -> None:
        """There is a host pool of this geometry: chunks can come and go, and the scheduler is told what is there."""
        if self._pipelines is not None or self._group is None or not (self._disk or self._remote):
            return
        try:
            buffers = Buffers(Staging(self._config.staging_bytes, blob_nbytes(geometry)))
        except ConfigError as error:
            measures.TIER_FAILURES.labels("staging").inc()
            _log.error("tiers_left_out", reason=error.message)
            self._why_closed = error.message
            return
        self._events.geometry = geometry_id(geometry)
        self._pipelines = made = self._make_pipelines(geometry, buffers)
        self._saving = self._group.create_task(made.saver.run())
        if self._remote is not None and self._disk is not None:
            for _ in range(max(1, self._threads.shares.background_most // 2)):
                self._endless.append(self._group.create_task(self._remote.run(self._disk.backend, buffers)))
        if self._warm_start is not None:
            self._endless.append(self._group.create_task(self._warm_start.announce()))

    async def save(self, order: SaveChunks) -> None:
        """Queue a save, or answer it."""
        if self._pipelines is None:
            await self._events.saved(order.save_id, error=self._reason)
        else:
            await self._pipelines.saver.add(order)

    async def fetch(self, order: FetchChunks) -> None:
        """Queue a fetch, or answer it."""
        if self._pipelines is None:
            await self._events.fetched(order.fetch_id, FetchProgress(0), is_over=True, error=self._reason)
        else:
            await self._pipelines.fetcher.add(order)

    def cancel(self, fetch_id: int) -> None:
        """Cut a fetch off."""
        if self._pipelines is not None:
            self._pipelines.fetcher.cancel(fetch_id)

    def pin(self, order: PinChunks) -> None:
        """Pin or unpin chunks of the cell's geometry. Raises InvalidRequest, or QueueFull beyond the bound."""
        if self._disk is None or not self._events.geometry:
            return
        if len(order.chunks) % DIGEST_BYTES:
            raise InvalidRequest(f"{len(order.chunks)} bytes are no list of chunks")
        for identity in split_digests(order.chunks):
            if not order.is_pinned:
                self._disk.index.unpin(identity, self._events.geometry)
            elif not self._disk.index.pin(identity, self._events.geometry):
                raise QueueFull(f"{self._disk.index.pinned} chunks are pinned already")

    def drop(self, order: DropChunks) -> None:
        """Queue a drop. Raises QueueFull."""
        saver, promotions = (None, None) if not (made := self._pipelines) else (made.saver, made.promotions)
        self._drops.add(order, saver, promotions)

    async def verify(self, call: VerifyChunks) -> ChunksVerified:
        """Check chunks of the disk."""
        if self._pipelines is None or self._pipelines.scrubber is None:
            return ChunksVerified(checked=0, nbytes=0)
        return await self._pipelines.scrubber.verify(call)

    def counters(self) -> dict[str, int]:
        """For the inventory."""
        counters = {"drops_outstanding": len(self._drops)}
        if self._disk is not None:
            index = self._disk.index
            counters |= {
                "disk_chunks": len(index),
                "disk_bytes": index.nbytes,
                "disk_quota_bytes": index.quota,
                "disk_pinned": index.pinned,
                "chunks_evicted": index.evicted,
                "chunks_quarantined": self._disk.quarantined,
                **{f"quarantined_{reason}": count for reason, count in self._disk.quarantined_by_reason.items()},
                "removals_outstanding": len(self._disk.removals),
            }
        if self._remote is not None:
            counters |= {
                "remote_chunks_refused": self._remote.refused,
                "chunks_uploaded": self._remote.uploaded,
                "uploads_failed": self._remote.upload_failures,
                "uploads_outstanding": self._remote.waiting,
            }
        if self._pipelines is not None:
            saves, fetches = self._pipelines.saver.totals, self._pipelines.fetcher.totals
            counters |= {
                "saves_done": saves.saves - saves.failed,
                "saves_failed": saves.failed,
                "saves_outstanding": len(self._pipelines.saver),
                "chunks_saved": saves.chunks,
                "bytes_saved": saves.nbytes,
                "fetches_done": fetches.fetches - fetches.failed,
                "fetches_failed": fetches.failed,
                "fetches_outstanding": len(self._pipelines.fetcher),
                "chunks_fetched_disk": fetches.disk_chunks,
                "chunks_fetched_remote": fetches.remote_chunks,
                "bytes_fetched": fetches.nbytes,
            }
            if self._pipelines.promotions is not None:
                counters |= {
                    "chunks_promoted": self._pipelines.promotions.promoted,
                    "promotions_outstanding": len(self._pipelines.promotions),
                }
        return counters

    async def run(self) -> None:
        """Work until :meth:`stop`."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            self._endless.append(group.create_task(self._drops.run()))
            if self._disk is not None and self._warm_start is not None:
                group.create_task(self._disk.removals.run())
                self._endless.append(group.create_task(self._warm_start.scan()))
            await self._stopping.wait()
            self._group = None
            self._why_closed = STOPPING
            made, self._pipelines = self._pipelines, None
            if made is not None:
                await made.fetcher.stop(STOPPING)
                await made.saver.stop(STOPPING)
                if self._saving is not None:
                    await self._saving  # It needs removals to run.
                if made.promotions is not None:
                    await made.promotions.ended()
            for task in self._endless:
                task.cancel()
            if self._disk is not None:
                self._disk.removals.stop()
        if made is not None:
            made.buffers.close()
        self._threads.close()

    def stop(self) -> None:
        """Begin nothing more; what is under way is finished or cut off, and answered."""
        self._stopping.set()

    @property
    def _reason(self) -> str:
        return self._why_closed if self._disk or self._remote else "this storage has neither disk nor object store"

    def _make_pipelines(self, geometry: KvGeometry, buffers: Buffers) -> _Pipelines:
        disk, remote, threads, keys, events = self._disk, self._remote, self._threads, self._keys, self._events
        promotions = Promotions(disk, buffers, threads, keys, events) if disk and remote else None
        source = ChunkSource(geometry, disk=disk, remote=remote, buffers=buffers, keys=keys, promotions=promotions)
        saver = Saver(
            pools=self._pools,
            gate=self._gate,
            disk=disk,
            remote=remote,
            buffers=buffers,
            threads=threads,
            keys=keys,
            events=events,
            confirm=self._confirm,
            max_saves=self._config.max_saves,
        )
        fetcher = Fetcher(pools=self._pools, gate=self._gate, source=source, threads=threads, events=events)
        scrubber = Scrubber(disk, buffers, threads, events, geometry, keys.cipher) if disk else None
        return _Pipelines(buffers, saver, fetcher, promotions, scrubber)
