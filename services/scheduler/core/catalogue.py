"""The catalogue of what each storage's disk holds: names of chunks, kept by what the storage says of them.

It is a belief, not the truth: a chunk that turns out to be gone or bad costs a fetch that ends early, and a chunk
that is not known is recomputed. What is only on disk has no node in the tree, for its tokens are known to nobody
but the requests that ask for it.
"""

from __future__ import annotations

from services.scheduler.core.state import CellState, Storage, count
from shared.chunks import chunk_bytes
from shared.ids import DIGEST_BYTES, split_digests


def chunks_added(state: CellState, storage: Storage, names: bytes) -> None:
    """The disk holds these chunks (16 bytes each) now. Repeats are harmless.

    A disk holds no more than its budget: beyond it, what was named first is forgotten.
    """
    if len(names) % DIGEST_BYTES:
        count(state, "malformed_inputs")
        return
    most = most_chunks(state, storage)
    held = storage.chunks
    for name in split_digests(names):
        held[name] = None
    while len(held) > most:
        del held[next(iter(held))]
        count(state, "catalogue_overflow_chunks")


def chunks_gone(state: CellState, storage: Storage, names: bytes) -> None:
    """The disk does not hold these chunks (16 bytes each) any more, if it ever did."""
    if len(names) % DIGEST_BYTES:
        count(state, "malformed_inputs")
        return
    for name in split_digests(names):
        storage.chunks.pop(name, None)


def most_chunks(state: CellState, storage: Storage) -> int:
    """Chunks that the disk has room for at the most: those of the cell's geometry, without their headers."""
    return storage.disk_bytes // chunk_bytes(state.geometry) if state.geometry is not None else 0


def has_lower_tiers(storage: Storage) -> bool:
    """Whether anything could be fetched from below this storage's host pool."""
    return bool(storage.chunks) or storage.has_remote
