"""Reads of a part of a prefix's KV from the disk. A worker calls ``rpc.storage.<id>.sparse``; see ``SparsePrefix``."""

from __future__ import annotations

from typing import Literal

from shared.messages.base import Message
from shared.messages.pools import SCALE_BYTES, scale_offset

BUFFER_KIND = "sparse"
"""Kind of the shared memory that workers lend for these reads; pools have other kinds, and only this one is written
to."""

SparsePart = Literal["keys", "kv", "values", "codes"]

LARGEST_CODE = 127
"""Codes of probe keys are integers of eight bits from minus this to this."""

MOST_LAYERS = 4
"""Layers whose keys one call may ask for. Each call takes milliseconds on a busy machine; keys of all layers at once
would hold the first of them up on a slow disk.
"""


class ReadSparse(Message, frozen=True):
    """Put KV of some tokens of a run of chunks into the caller's shared memory: one layer's, or the keys of several.

    ``chunks`` are the names (16 bytes each) of consecutive chunks; the first begins ``depth`` tokens below
    the root of ``namespace``. Tokens are positions from the root, packed int32; all lie within the chunks. The
    result goes to ``offset`` of the segment ``buffer``, in the model's data type, row-major and without gaps:

    * ``codes``: K of the KV ``heads`` of tokens [start, end) for choosing, rounded to eight bits,
      ``[layers, len(heads), end - start, code_bytes]``, of ``layers`` layers from ``layer`` on, up to
      :data:`MOST_LAYERS`; only of heads that copies have apart (probe heads);
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
    nbytes: int  # Bytes of the result.
    heads: tuple[int, ...] = ()
    start: int = 0
    end: int = 0
    tokens: bytes = b""
    key_id: str = ""
    layers: int = 1


class SparseRead(Message, frozen=True):
    """Answer: all of it was written, and this is its xxh3_64; or ``error`` says why not.

    In either case nothing is written any more. ``code`` is that of the error (``shared.errors``).
    """

    checksum: int = 0
    disk_bytes: int = 0  # Bytes read from the disk for it.
    seconds: float = 0.0  # Duration, waiting for the disk included.
    error: str = ""
    code: str = ""


def code_bytes(head_dim: int) -> int:
    """Return the bytes of one head's key of one token as codes with their scale, a multiple of four. Pure."""
    return scale_offset(head_dim) + SCALE_BYTES
