"""Reads of a part of a prefix's KV from the disk. A worker calls ``rpc.storage.<id>.sparse``; see ``SparsePrefix``."""

from __future__ import annotations

from typing import Literal

from shared.messages.base import Message

BUFFER_KIND = "sparse"
"""Kind of the shared memory that workers lend for these reads; pools have others, and only this one is written to."""

SparsePart = Literal["keys", "kv", "values"]


class ReadSparse(Message, frozen=True):
    """Put one layer's KV of some tokens of a run of chunks into the caller's shared memory.

    ``chunks`` are the names (16 bytes each) of consecutive chunks; the first begins ``depth`` tokens below
    the root of ``namespace``. Tokens are positions from the root, packed int32; all lie within the chunks. What is
    written at ``offset`` of the segment ``buffer``, in the model's data type, row-major and without gaps:

    * ``keys``: K of the KV ``heads`` of tokens [start, end), ``[len(heads), end - start, head_dim]``;
    * ``kv``: K and V of all KV heads of ``tokens``, ascending, ``[2, n, kv_heads, head_dim]``;
    * ``values``: V of each of ``heads`` at tokens of its own, ``[len(heads), n, head_dim]``; ``tokens`` are then
      ``[len(heads), n]``, each row ascending.
    """

    namespace: str
    depth: int
    chunks: bytes
    layer: int
    part: SparsePart
    buffer: str
    offset: int
    nbytes: int  # That what is asked for takes there.
    heads: tuple[int, ...] = ()
    start: int = 0
    end: int = 0
    tokens: bytes = b""
    key_id: str = ""


class SparseRead(Message, frozen=True):
    """Answer: all of it was written, nothing writes there any more, and this is its xxh3_64; or ``error`` says why not.

    With ``error``, too, nothing is written any more. ``code`` is then that of the error (``shared.errors``).
    """

    checksum: int = 0
    disk_bytes: int = 0  # Read from the disk for it.
    seconds: float = 0.0  # That took, waiting for the disk included.
    error: str = ""
    code: str = ""
