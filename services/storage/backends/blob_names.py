"""Which chunk a blob says it is, of whatever form, and where in its sequence it belongs."""

from __future__ import annotations

from services.storage import chunk_format
from services.storage.backends import UNKNOWN, ChunkEntry
from services.storage.core.save_check import key_above
from services.storage.sparse import format as sparse_format
from shared.chunks import chunk_tokens


def entry_in(head: memoryview, nbytes: int) -> ChunkEntry:
    """What the first block of a blob of ``nbytes`` bytes says in its header.

    Raises IntegrityError as ``read_fixed`` of either format does; what is neither is ``not_a_chunk``.
    """
    if bytes(head[: len(sparse_format.MAGIC)]) == sparse_format.MAGIC:
        copy = sparse_format.read_fixed(head, nbytes)
        if not any(copy.parent):
            return ChunkEntry(copy.key, nbytes, UNKNOWN)  # Written by a release that did not say.
        above = key_above(copy.namespace, copy.parent, copy.depth, copy.key.geometry)
        return ChunkEntry(copy.key, nbytes, copy.depth // copy.layout.tokens, above)
    chunk = chunk_format.read_fixed(head, nbytes)
    above = key_above(chunk.namespace, chunk.parent, chunk.depth, chunk.key.geometry)
    return ChunkEntry(chunk.key, nbytes, chunk.depth // chunk_tokens(chunk.geometry.page_size), above)
