"""The movement of chunks of one form between its pool and the tiers: saves, fetches, and promotions to the disk.

KV and hidden states have pipelines of their own, because their pages lie in different pools and their chunks differ in
size. They share the tiers below: one disk with one quota, one object store, and one set of threads that takes turns.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from services.storage.buffers import Buffers
from services.storage.chunk_format import blob_nbytes
from services.storage.chunk_keys import ChunkKeys
from services.storage.chunk_source import ChunkSource
from services.storage.config import StorageConfig
from services.storage.disk_tier import DiskTier
from services.storage.fetcher import Fetcher
from services.storage.io_threads import IoThreads
from services.storage.page_gate import PageGate
from services.storage.pools import Pools
from services.storage.promotions import Promotions
from services.storage.remote_tier import RemoteTier
from services.storage.saver import Saver
from services.storage.sharing.lenders import Lenders
from services.storage.sparse.parts import SparseParts, make_sparse
from services.storage.staging import Staging
from services.storage.tier_events import TierEvents
from services.storage.uploads import Uploads
from shared.messages.pools import HIDDEN, ChunkForm, KvGeometry
from shared.tracing import Tracer


def form_of(geometry: KvGeometry) -> ChunkForm:
    """Return the form that pages of this geometry hold."""
    return HIDDEN if geometry.is_hidden else "kv"


@dataclass(frozen=True, slots=True)
class Below:
    """The tiers and threads that the pipelines of both forms share."""

    disk: DiskTier | None
    remote: RemoteTier | None
    uploads: Uploads | None
    threads: IoThreads
    keys: ChunkKeys
    events: TierEvents
    tracer: Tracer | None = None
    lenders: Lenders | None = None
    disk_bytes_per_s: float = 0.0  # Limit or measured speed of disk reads; 0 is not known.


@dataclass(frozen=True, slots=True)
class Pipelines:
    """The pipelines for chunks of one geometry. The owner runs ``saver.run``."""

    buffers: Buffers
    source: ChunkSource
    saver: Saver
    fetcher: Fetcher
    promotions: Promotions | None
    sparse: SparseParts | None
    """Sparse copies of chunks of KV; None where there are none. The owner runs its parts' ``run``, too."""

    async def stop(self, reason: str) -> None:
        """Begin nothing more; fetches are answered when this returns, saves when ``saver.run`` does."""
        await self.fetcher.stop(reason)
        await self.source.stop()
        await self.saver.stop(reason)
        if self.sparse is not None:
            await self.sparse.reader.stop()
            await self.sparse.copies.stop()


def make_pipelines(
    geometry: KvGeometry,
    below: Below,
    config: StorageConfig,
    pools: Pools,
    gate: PageGate,
    confirm: Callable[[], Awaitable[None]],
    *,
    is_read_in_part: bool = True,
) -> Pipelines:
    """Return the pipelines between the pool of this geometry, whose pages ``gate`` guards, and the tiers.

    Without workers that read parts of chunks (``is_read_in_part``) there are no sparse copies.

    Raises ConfigError when no chunk of it fits in the memory for chunks in transit.
    """
    form = form_of(geometry)
    disk, remote, threads, keys, events = below.disk, below.remote, below.threads, below.keys, below.events
    abandoned = disk.directories.abandoned if disk else None
    buffers = Buffers(Staging(config.staging_bytes, blob_nbytes(geometry)), abandoned)
    sparse = None
    if is_read_in_part:
        sparse = make_sparse(geometry, disk, threads, keys, events, config, below.disk_bytes_per_s)
    copies = sparse.copies if sparse else None
    promotions = Promotions(disk, buffers, threads, keys, events, copies) if disk and remote else None
    source = ChunkSource(
        geometry, disk=disk, remote=remote, buffers=buffers, keys=keys, promotions=promotions, copies=copies
    )
    saver = Saver(
        form=form,
        pools=pools,
        gate=gate,
        disk=disk,
        remote=remote,
        uploads=below.uploads,
        buffers=buffers,
        threads=threads,
        keys=keys,
        events=events,
        confirm=confirm,
        copies=copies,
        max_saves=config.max_saves,
    )
    fetcher = Fetcher(
        form=form,
        pools=pools,
        gate=gate,
        source=source,
        threads=threads,
        events=events,
        tracer=below.tracer,
        lenders=below.lenders,
    )
    return Pipelines(buffers, source, saver, fetcher, promotions, sparse)
