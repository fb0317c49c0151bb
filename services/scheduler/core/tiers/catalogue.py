"""The catalogue of each storage's disk: names of chunks in each form, kept by what the storage reports.

It is a belief, not the truth: a chunk that turns out to be gone or bad costs a fetch that ends early, and a chunk that
is not known is recomputed. Chunks that are only on disk have no node in the tree, for only the requests that ask for
them know their tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.chunks import chunk_bytes
from shared.ids import DIGEST_BYTES, split_digests
from shared.messages.pools import HIDDEN

if TYPE_CHECKING:
    from services.scheduler.core.state import CellState, Storage
    from shared.messages.pools import ChunkForm


def chunks_added(state: CellState, storage: Storage, names: bytes, form: ChunkForm = "kv") -> None:
    """Add chunks (16 bytes each) of one form that the disk holds now. Repeats are harmless.

    A disk holds no more than its budget: beyond it, the chunks named first are forgotten.
    """
    if len(names) % DIGEST_BYTES:
        state.count("malformed_inputs")
        return
    most = most_chunks(state, storage, form)
    held = _held(storage, form)
    for name in split_digests(names):
        held[name] = None
    while len(held) > most:
        del held[next(iter(held))]
        state.count("catalogue_overflow_chunks")


def chunks_gone(state: CellState, storage: Storage, names: bytes, form: ChunkForm = "kv") -> None:
    """Remove chunks (16 bytes each) of one form that the disk does not hold any more; unknown ones are ignored."""
    if len(names) % DIGEST_BYTES:
        state.count("malformed_inputs")
        return
    held = _held(storage, form)
    for name in split_digests(names):
        held.pop(name, None)


def arrived_chunks(state: CellState, chunks: int, ordered: int) -> int:
    """Return the number of arrived chunks that a report of a fetch means, clamped to 0..``ordered``.

    A report outside of that is counted as malformed.
    """
    if not 0 <= chunks <= ordered:
        state.count("malformed_inputs")
    return min(max(0, chunks), ordered)


def most_chunks(state: CellState, storage: Storage, form: ChunkForm = "kv") -> int:
    """Return how many chunks of one form the disk has room for at most, without their headers.

    KV is of the cell's geometry, whole or readable in part, and hidden states of the storage's hidden pool's; 0 where
    that geometry is not known.
    """
    geometry = state.geometry
    if form == "sparse" and not storage.sparse.is_kept:
        return 0
    if form == HIDDEN:
        geometry = storage.hidden.handle.geometry if storage.hidden.handle is not None else None
    return storage.disk.budget_bytes // chunk_bytes(geometry) if geometry is not None else 0


def has_lower_tiers(storage: Storage) -> bool:
    """Return whether anything could be fetched from below this storage's host pool."""
    is_on_disk = bool(storage.disk.chunks or storage.hidden.chunks or storage.sparse.chunks)
    return is_on_disk or storage.disk.has_remote


def is_hidden_kept(storage: Storage, name: bytes) -> bool:
    """Return whether this chunk's hidden states are on the disk or being saved. Does not change the state."""
    return name in storage.hidden.chunks or name in storage.hidden.saving


def _held(storage: Storage, form: ChunkForm) -> dict[bytes, None]:
    if form == "sparse":
        return storage.sparse.chunks
    return storage.hidden.chunks if form == HIDDEN else storage.disk.chunks
