"""Which chunk a blob says it is, of whatever form."""

from __future__ import annotations

from services.storage import chunk_format
from services.storage.backends import ChunkKey
from services.storage.sparse import format as sparse_format


def name_in(head: memoryview, nbytes: int) -> ChunkKey:
    """The name that the first block of a blob of ``nbytes`` bytes has in its header.

    Raises IntegrityError as ``read_fixed`` of either format does; what is neither is ``not_a_chunk``.
    """
    if bytes(head[: len(sparse_format.MAGIC)]) == sparse_format.MAGIC:
        return sparse_format.read_fixed(head, nbytes).key
    return chunk_format.read_fixed(head, nbytes).key
