"""Which chunk a blob says it is, of whatever form."""

from __future__ import annotations

from dataclasses import dataclass

from services.storage import chunk_format
from services.storage.backends import ChunkKey
from services.storage.sparse import format as sparse_format


@dataclass(frozen=True, slots=True)
class Named:
    """What the header of a blob says: the name at rest, and whose key seals it ("" is none)."""

    key: ChunkKey
    key_id: str

    @property
    def tells_tokens(self) -> bool:
        """Whether it is sealed, and its name, of a release before 0.3, confirms who guesses its tokens."""
        return bool(self.key_id) and not self.key.is_sealed


def name_in(head: memoryview, nbytes: int) -> Named:
    """The name that the first block of a blob of ``nbytes`` bytes has in its header.

    Raises IntegrityError as ``read_fixed`` of either format does; what is neither is ``not_a_chunk``.
    """
    if bytes(head[: len(sparse_format.MAGIC)]) == sparse_format.MAGIC:
        copy = sparse_format.read_fixed(head, nbytes)
        return Named(copy.key, copy.key_id)
    chunk = chunk_format.read_fixed(head, nbytes)
    return Named(chunk.key, chunk.key_id)
