"""What sparse copies of one geometry need, made and joined."""

from __future__ import annotations

from dataclasses import dataclass

from services.storage import measures
from services.storage.backends import PartialReads
from services.storage.buffers import Buffers
from services.storage.chunk_keys import ChunkKeys
from services.storage.config import StorageConfig
from services.storage.disk_tier import DiskTier
from services.storage.io_threads import IoThreads
from services.storage.paced_reads import PacedReads
from services.storage.sparse.chunk_turns import ChunkTurns
from services.storage.sparse.copies import SparseCopies
from services.storage.sparse.layout import SparseLayout
from services.storage.sparse.opened_heads import OpenedHeads
from services.storage.sparse.read_plan import gap_worth_reading, region_bytes
from services.storage.sparse.reader import SparseReader
from services.storage.sparse.reordering import Reordering
from services.storage.staging import Staging
from services.storage.tier_events import TierEvents
from shared import logs
from shared.errors import ConfigError, InvalidRequest
from shared.messages.pools import KvGeometry

_log = logs.get_logger("storage")


@dataclass(frozen=True, slots=True)
class SparseParts:
    """``copies.run`` and, where there is one, ``reordering.run`` are for the owner to start; the first ends after
    ``copies.stop``.
    """

    layout: SparseLayout
    copies: SparseCopies
    reader: SparseReader
    reordering: Reordering | None
    scrubbing: Buffers
    """A buffer that holds a whole copy, for the scrubber."""
    _regions: Buffers
    _staging: Staging

    def close(self) -> None:
        """Let go of the memory, once nothing runs."""
        self.scrubbing.close()
        self._regions.close()
        self._staging.close()


def make_sparse(
    geometry: KvGeometry,
    disk: DiskTier | None,
    threads: IoThreads,
    keys: ChunkKeys,
    events: TierEvents,
    config: StorageConfig,
    disk_bytes_per_s: float = 0.0,
) -> SparseParts | None:
    """For copies of chunks of KV of ``geometry``, read from a disk that gives ``disk_bytes_per_s`` (0 is not known);
    None where the settings ask for none, or where they cannot be kept: the log says why, and the storage serves without
    them.
    """
    if not config.sparse or disk is None or geometry.is_hidden:
        return None
    backend = disk.backend
    try:
        if not isinstance(backend, PartialReads):
            raise ConfigError(f"a disk tier in {backend.name} cannot be read in part")
        layout = SparseLayout.of(geometry, block_tokens=config.sparse_block_tokens)
        blob_bytes = layout.blob_bytes(is_sealed=True)  # Not the less of the two.
        staging = Staging(config.staging_bytes, blob_bytes)
    except (ConfigError, InvalidRequest) as error:
        measures.TIER_FAILURES.labels("staging").inc()
        _log.error("sparse_left_out", reason=error.message)
        return None
    depth = threads.shares.depth
    region = max(region_bytes(layout), layout.header_bytes(is_sealed=True))
    abandoned = disk.directories.abandoned
    regions = Buffers(Staging(depth * region, region), abandoned)
    turns, heads = ChunkTurns(), OpenedHeads()
    reordering = None
    if config.sparse_reorder_bytes_per_s:
        reordering = Reordering(
            layout,
            disk,
            staging=staging,
            turns=turns,
            heads=heads,
            cipher=keys.cipher,
            events=events,
            pace=PacedReads(config.sparse_reorder_bytes_per_s),
        )
    copies = SparseCopies(
        layout, disk, staging=staging, turns=turns, heads=heads, threads=threads, keys=keys, events=events
    )
    reader = SparseReader(
        layout,
        disk,
        backend,
        buffers=regions,
        turns=turns,
        heads=heads,
        keys=keys,
        events=events,
        at_once=depth,
        gap_bytes=gap_worth_reading(disk_bytes_per_s),
        learn=reordering.learn if reordering else None,
    )
    scrubbing = Buffers(Staging(blob_bytes, blob_bytes), abandoned)
    return SparseParts(layout, copies, reader, reordering, scrubbing, regions, staging)
