"""Sparse prefixes: the part of a request's prompt that is, or is to be, read sparsely. Plain data of a snapshot."""

from __future__ import annotations

import msgspec

from services.scheduler.core.cache.shares import ChunkShares
from services.scheduler.core.speed_fit import Rate


class SparseChoice(msgspec.Struct, frozen=True):
    """A waiting request's tokens from ``depth`` on that are to be read sparsely.

    They go as far as ``chunks`` (16 bytes each).
    """

    storage_id: str
    depth: int  # Where the first chunk begins.
    chunks: bytes


class SparseSpan(msgspec.Struct):
    """Tokens [start, end) of an admitted request; each layer reads the important ones (IMPRESS 4.1).

    ``chunks`` (16 bytes each) hold them; the first begins ``depth`` tokens below the root. ``pages`` (packed) are
    leased to the request beside its page table, for the tokens that are read.
    """

    storage_id: str
    start: int
    end: int
    depth: int
    chunks: bytes
    pages: bytes = b""
    expected_us: float = 0.0  # Predicted time of reading chosen tokens at the disk's rate.
    predicted_us: float = 0.0  # Predicted time of all reads by the observed paces of such reads.
    expected_keys_us: float = 0.0  # Predicted time of reading keys at the disk's rate.


class SparseTier(msgspec.Struct):
    """A storage's chunks in the form that can be read sparsely."""

    is_kept: bool = False  # Its disk keeps a second copy of KV chunks for sparse reads.
    is_left_out: bool = False  # It was asked to keep copies, and keeps none: its node's workers read no parts.
    chunks: dict[bytes, None] = {}  # Chunks that it reported in that form.
    pace: Rate = msgspec.field(default_factory=Rate)  # Expected time of reading chosen tokens over the time it took.
    keys_pace: Rate = msgspec.field(default_factory=Rate)  # The same of keys to choose by.
    overruled: int = 0  # Decisions against such reads that rest on these paces alone.
    shares: ChunkShares = msgspec.field(default_factory=ChunkShares)  # Important shares of chunks read sparsely.
