"""Where everything lies in a sparse copy of a chunk: sizes and places, which follow from its shape alone.

A copy has, in this order, each beginning on a block of the disk::

    0              header and tables (``format``)
    probe_at       keys of the probe heads as codes (``key_codes``) [probe_heads, layers, tokens, code_bytes], in order
                   of the tokens: a head's keys of several layers lie side by side
    kv_at          rows [layers, 2, tokens, kv_heads, head_dim]: K, then V; in the order that the ``mapping`` says

A **row** is K or V of one token in one layer. Rows that lie behind one another make a **block** of ``block_tokens``
rows. A **unit** is what has a checksum of its own: one block, or one probe head's keys in one layer. In each layer the
first units are the probe heads', then come the blocks of K, then those of V.

Copies of earlier releases have probe keys as they were computed, ``[layers, probe_heads, tokens, head_dim]``; they can
be verified, but have names of their own, and are not read.

IMPRESS reads K or V of 64 tokens at a time (6.1). Here a block is as small as the disk can read it alone, because what
is chosen lies scattered. Rows that divide :data:`BLOCK_BYTES` fill one block of the disk. Others cannot: there a block
has as many rows as half of one holds, because a block that begins within a block of the disk is read with all of it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from services.storage.backends import BLOCK_BYTES, ChunkKey, whole_blocks
from shared.chunks import GEOMETRY_BYTES, chunk_tokens
from shared.errors import InvalidRequest
from shared.importance import PROBE_HEADS
from shared.messages.pools import DTYPE_BYTES, KvGeometry
from shared.messages.sparse_reads import code_bytes

VERSION = 1  # Of this layout, which is in the names of copies.
FIXED_BYTES = 256
MAPPING_BYTES = 4  # Of one row: uint32.
CHECKSUM_BYTES = 8
NONCE_BYTES, TAG_BYTES = 12, 16
SEAL_BYTES = NONCE_BYTES + TAG_BYTES

K, V = 0, 1
"""The halves of a layer."""


@dataclass(frozen=True)
class SparseLayout:
    """The layout of all copies of chunks of one KV geometry. ``block_tokens`` divides the chunk's tokens."""

    geometry: KvGeometry
    probe_heads: int
    block_tokens: int
    has_codes: bool = True
    """Whether probe keys are codes; False in copies of earlier releases."""

    @classmethod
    def of(cls, geometry: KvGeometry, *, block_tokens: int = 0) -> SparseLayout:
        """Return the layout for chunks of KV of ``geometry`` that this storage writes.

        ``block_tokens`` 0 is the rule above. Raises InvalidRequest for hidden states, and for blocks that do not divide
        a chunk.
        """
        layout = cls(geometry, min(PROBE_HEADS, geometry.kv_heads), block_tokens or 1)
        if not block_tokens:
            # Only powers of two that divide the chunk: 64 always does.
            most = layout.tokens & -layout.tokens
            room = BLOCK_BYTES // 2 if BLOCK_BYTES % layout.row_bytes else BLOCK_BYTES
            wanted = 1 << max(0, (room // layout.row_bytes).bit_length() - 1)
            layout = cls(geometry, layout.probe_heads, min(wanted, most))
        fault = layout.fault()
        if fault:
            raise InvalidRequest(f"no sparse copy can be made of chunks of {geometry}: {fault}")
        return layout

    def fault(self) -> str:
        """Return why there is no such layout, or ""."""
        if self.geometry.fault() or self.geometry.is_hidden:
            return self.geometry.fault() or "they hold hidden states"
        if self.geometry.is_rounded:
            return "they hold K and V rounded to eight bits"
        if not 1 <= self.probe_heads <= self.geometry.kv_heads:
            return f"{self.probe_heads} of {self.geometry.kv_heads} KV heads cannot be apart"
        if self.block_tokens < 1 or self.tokens % self.block_tokens:
            return f"blocks of {self.block_tokens} do not divide {self.tokens} tokens"
        return ""

    @cached_property
    def shape(self) -> bytes:
        """Eight bytes that stand for this layout in the names of chunks, where others have their geometry's digest."""
        geometry = self.geometry
        sizes = (geometry.layers, geometry.kv_heads, geometry.head_dim, geometry.page_size, geometry.dtype)
        kind = ("codes",) if self.has_codes else ()
        parts = ("sparse", VERSION, *sizes, self.probe_heads, self.block_tokens, *kind)
        return hashlib.blake2b(repr(parts).encode(), digest_size=GEOMETRY_BYTES).digest()

    def key(self, namespace: str, identity: bytes) -> ChunkKey:
        """Return the name of the copy of the chunk of KV that has this identity."""
        return ChunkKey(namespace, self.shape, identity)

    @cached_property
    def tokens(self) -> int:
        """Number of tokens in a chunk."""
        return chunk_tokens(self.geometry.page_size)

    @cached_property
    def head_bytes(self) -> int:
        """Bytes of one token's K (or V) in one head."""
        return self.geometry.head_dim * DTYPE_BYTES[self.geometry.dtype]

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one token's K (or V) in one layer."""
        return self.geometry.kv_heads * self.head_bytes

    @cached_property
    def blocks(self) -> int:
        """Number of blocks in one layer's K or V."""
        return self.tokens // self.block_tokens

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.block_tokens * self.row_bytes

    @cached_property
    def units(self) -> int:
        """Number of units in one layer."""
        return self.probe_heads + 2 * self.blocks

    @cached_property
    def probe_bytes(self) -> int:
        """Bytes of the probe keys of one layer."""
        return self.probe_heads * self.probe_unit_bytes

    @cached_property
    def probe_row_bytes(self) -> int:
        """Bytes of one token's key of a probe head in one layer."""
        return code_bytes(self.geometry.head_dim) if self.has_codes else self.head_bytes

    @cached_property
    def probe_unit_bytes(self) -> int:
        """Bytes of one probe head's keys in one layer."""
        return self.tokens * self.probe_row_bytes

    @cached_property
    def layer_bytes(self) -> int:
        """Bytes of the rows of one layer, K and V."""
        return 2 * self.tokens * self.row_bytes

    @cached_property
    def table_bytes(self) -> int:
        """Bytes of the tables of a copy that is not sealed: the mapping, and one checksum for each unit."""
        return self.tokens * MAPPING_BYTES + self.geometry.layers * self.units * CHECKSUM_BYTES

    @cached_property
    def seals_bytes(self) -> int:
        """Bytes that the tables of a sealed copy have besides: nonce and tag of every unit."""
        return self.geometry.layers * self.units * SEAL_BYTES

    @cached_property
    def _starts(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Where probe keys and rows begin: in a copy that is not sealed, and in one that is."""
        heads = (FIXED_BYTES + self.table_bytes, FIXED_BYTES + SEAL_BYTES + self.table_bytes + self.seals_bytes)
        probes = whole_blocks(self.geometry.layers * self.probe_bytes)
        plain, sealed = (whole_blocks(head) for head in heads)
        return (plain, plain + probes), (sealed, sealed + probes)

    def header_bytes(self, *, is_sealed: bool) -> int:
        """Return the bytes of header and tables, whole blocks: they must be read before a part can be."""
        return self._starts[is_sealed][0]

    def kv_at(self, *, is_sealed: bool) -> int:
        """Return the offset of the rows in the copy."""
        return self._starts[is_sealed][1]

    def blob_bytes(self, *, is_sealed: bool) -> int:
        """Return the bytes of a whole copy, whole blocks."""
        return self.kv_at(is_sealed=is_sealed) + whole_blocks(self.geometry.layers * self.layer_bytes)

    def units_at(self, layer: int, units: npt.NDArray[np.intp], *, is_sealed: bool) -> tuple[npt.NDArray[np.intp], int]:
        """Return the offset of each unit and the bytes of one; all are units of probe heads, or all are blocks."""
        start, nbytes = self.unit_at(layer, int(units[0]), is_sealed=is_sealed)
        step = nbytes * self.geometry.layers if self.has_codes and units[0] < self.probe_heads else nbytes
        return start + (units - units[0]) * step, nbytes

    def unit_at(self, layer: int, unit: int, *, is_sealed: bool) -> tuple[int, int]:
        """Return the offset of a unit and its bytes."""
        probe_at, kv_at = self._starts[is_sealed]
        if unit < self.probe_heads:
            layers, heads = self.geometry.layers, self.probe_heads
            place = unit * layers + layer if self.has_codes else layer * heads + unit
            return probe_at + place * self.probe_unit_bytes, self.probe_unit_bytes
        return kv_at + layer * self.layer_bytes + (unit - self.probe_heads) * self.block_bytes, self.block_bytes
