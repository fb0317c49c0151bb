"""Geometry and handles of KV pools."""

from __future__ import annotations

from typing import Literal

from shared.messages.base import Message

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

Layout = Literal["layer_first", "page_first"]


class KvGeometry(Message, frozen=True):
    """Shape of the KV of one page. Two pools can exchange pages only if their geometries are equal."""

    layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str

    @property
    def half_bytes(self) -> int:
        """Bytes of K alone (or V alone) of one page in one layer: page_size * kv_heads * head_dim."""
        return self.page_size * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: all layers, K and V."""
        return self.layers * 2 * self.half_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of KV of one token: all layers, K and V."""
        return self.page_bytes // self.page_size


class PoolHandle(Message, frozen=True):
    """How another process maps a pool.

    layout ``layer_first``: bytes are ``[layers, 2, pages, page_size, kv_heads, head_dim]`` (device pools).
    layout ``page_first``: ``[pages, layers, 2, page_size, kv_heads, head_dim]`` (host pools), followed, from
    offset ``table_offset``, by the identity table ``[pages, 16]`` uint8 and then the checksum table
    ``[pages, layers]`` little-endian uint64 (xxh3_64 over K then V bytes of that page and layer, seeded with
    the low 8 bytes of the identity).
    ``kind`` is ``shm`` (``name`` is a file in /dev/shm) or ``cuda_ipc`` (``ipc`` is the exported handle).
    """

    kind: Literal["shm", "cuda_ipc"]
    layout: Layout
    name: str
    nbytes: int
    pages: int
    geometry: KvGeometry
    table_offset: int = 0
    ipc: bytes = b""
