"""What sparse copies of one geometry need, made and joined."""

from __future__ import annotations

from dataclasses import dataclass

from services.storage import measures
from services.storage.buffers import Buffers
from services.storage.chunk_keys import ChunkKeys
from services.storage.config import StorageConfig
from services.storage.disk_tier import DiskTier
from services.storage.io_threads import IoThreads
from services.storage.sparse.chunk_turns import ChunkTurns
from services.storage.sparse.copies import SparseCopies
from services.storage.sparse.layout import SparseLayout
from services.storage.sparse.opened_heads import OpenedHeads
from services.storage.sparse.read_plan import gap_worth_reading, region_bytes
from services.storage.sparse.reader import SparseReader
from services.storage.staging import Staging
from services.storage.tier_events import TierEvents
from shared import logs
from shared.errors import ConfigError, InvalidRequest
from shared.messages.pools import KvGeometry

_log = logs.get_logger("storage")


@dataclass(frozen=True, slots=True)
class SparseParts:
    """The parts that read and write sparse copies of one layout.

    The owner starts ``copies.run``, which ends after ``copies.stop``.
    """

    layout: SparseLayout
    copies: SparseCopies
    reader: SparseReader
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
    """Return the parts for copies of chunks of KV of ``geometry``, or None where no copies are kept.

    ``disk_bytes_per_s`` is the speed of the disk that they are read from; 0 is not known. None where the settings ask
    for no copies, or where they cannot be kept: the log says why, and the storage serves without them.
    """
    if not config.sparse or disk is None or geometry.is_hidden:
        return None
    try:
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
    copies = SparseCopies(
        layout, disk, staging=staging, turns=turns, heads=heads, threads=threads, keys=keys, events=events
    )
    reader = SparseReader(
        layout,
        disk,
        buffers=regions,
        turns=turns,
        heads=heads,
        keys=keys,
        events=events,
        at_once=depth,
        gap_bytes=gap_worth_reading(disk_bytes_per_s),
    )
    scrubbing = Buffers(Staging(blob_bytes, blob_bytes), abandoned)
    return SparseParts(layout, copies, reader, scrubbing, regions, staging)
