"""The chunk that a blob, of any form, claims to be, and its place in its sequence."""

from __future__ import annotations

from dataclasses import replace

from services.storage import chunk_format
from services.storage.backends import UNKNOWN, ChunkEntry, ChunkKey
from services.storage.sparse import format as sparse_format
from shared.chunks import chunk_tokens


def entry_in(head: memoryview, nbytes: int) -> ChunkEntry:
    """Return the entry that the first block of a blob of ``nbytes`` bytes describes, in names at rest.

    Raises IntegrityError as ``read_fixed`` of either format does; a blob of neither is ``not_a_chunk``.
    """
    if bytes(head[: len(sparse_format.MAGIC)]) == sparse_format.MAGIC:
        copy = sparse_format.read_fixed(head, nbytes)
        if not any(copy.parent):
            return ChunkEntry(copy.key, nbytes, UNKNOWN, key_id=copy.key_id)  # Written before it was recorded.
        return _entry(copy.key, copy.parent, copy.depth, copy.layout.tokens, copy.key_id, nbytes)
    chunk = chunk_format.read_fixed(head, nbytes)
    tokens = chunk_tokens(chunk.geometry.page_size)
    return _entry(chunk.key, chunk.parent, chunk.depth, tokens, chunk.key_id, nbytes)


def _entry(key: ChunkKey, parent: bytes, depth: int, tokens: int, key_id: str, nbytes: int) -> ChunkEntry:
    above = replace(key, identity=parent) if depth else None  # Its identity is hidden if the chunk's own is.
    return ChunkEntry(key, nbytes, depth // tokens, above, key_id=key_id)
