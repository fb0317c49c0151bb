"""Sparse prefixes: which part of a request's prompt is to be read in part only, or was. Plain data of a snapshot."""

from __future__ import annotations

import msgspec

from services.scheduler.core.cache.shares import ChunkShares
from services.scheduler.core.speed_fit import Rate


class SparseChoice(msgspec.Struct, frozen=True):
    """A waiting request's tokens from ``depth`` on are to be read in part, as far as ``chunks`` go (16 bytes each)."""

    storage_id: str
    depth: int  # Where the first chunk begins.
    chunks: bytes


class SparseSpan(msgspec.Struct):
    """Tokens [start, end) of an admitted request; each layer reads what is important of them (IMPRESS 4.1).

    ``chunks`` (16 bytes each) hold them; the first begins ``depth`` tokens below the root. ``pages`` (packed)
    are leased to the request beside its page table, for what is read.
    """

    storage_id: str
    start: int
    end: int
    depth: int
    chunks: bytes
    pages: bytes = b""
    expected_us: float = 0.0  # What reading should take at the disk's rate,
    predicted_us: float = 0.0  # and by what was seen of such reads.


class SparseTier(msgspec.Struct):
    """What a storage has in a form that can be read in part."""

    is_kept: bool = False  # Its disk keeps chunks of KV a second time, so that they can be read in part.
    chunks: dict[bytes, None] = {}  # Those that it holds in that form, as far as it said.
    pace: Rate = msgspec.field(default_factory=Rate)  # Expected time of such reads over the time they took.
    overruled: int = 0  # Decisions against such reads for which only that pace spoke.
    shares: ChunkShares = msgspec.field(default_factory=ChunkShares)  # What was important of chunks read in part.
