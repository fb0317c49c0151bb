"""Chunks, the unit of the tiers below host memory: KV or hidden states of 64 tokens, cut at multiples of 64.

A chunk holds whole pages, one behind the other, each page-first; its grid is absolute, so two prompts that share a
prefix share its chunks however the radix tree has cut them into nodes. A chunk is named by the identity of its
last page (``shared.ids``), which stands for its namespace and for every token from the root to its end; together with
its geometry, which tells KV from hidden states, that is its key in every tier.
"""

from __future__ import annotations

import hashlib
import math
from itertools import chain
from struct import iter_unpack

from shared.ids import DIGEST_BYTES
from shared.messages.pools import KvGeometry

CHUNK_TOKENS = 64
GEOMETRY_BYTES = 8

FETCH_PARTS = 9
"""Most parts in which a storage tells of a fetch. After each, restoring from hidden states can go on."""


def chunk_tokens(page_size: int) -> int:
    """Return the number of tokens of a chunk: 64, or the least multiple of it that whole pages fill."""
    return math.lcm(CHUNK_TOKENS, page_size)


def chunks_of_part(chunks: int) -> int:
    """Return the number of chunks in each part of a fetch of ``chunks`` chunks; the last part may have fewer."""
    return -(-chunks // FETCH_PARTS)


def chunk_pages(page_size: int) -> int:
    """Return the number of pages of a chunk."""
    return chunk_tokens(page_size) // page_size


def chunk_bytes(geometry: KvGeometry) -> int:
    """Return the bytes of the pages of one chunk, without its header."""
    return chunk_pages(geometry.page_size) * geometry.page_bytes


def geometry_id(geometry: KvGeometry) -> bytes:
    """Return eight bytes that identify a geometry in the names of chunks: pages of another shape are never found."""
    parts: tuple[int | str, ...] = (
        geometry.layers,
        geometry.kv_heads,
        geometry.head_dim,
        geometry.page_size,
        geometry.dtype,
    )
    if geometry.is_hidden:
        parts += (geometry.hidden, geometry.absent, geometry.from_hidden)
    return hashlib.blake2b(repr(parts).encode(), digest_size=GEOMETRY_BYTES).digest()


def chunk_names(identities: bytes, pages: int) -> list[bytes]:
    """Return the names of whole chunks of ``pages`` pages each from the identities of their pages (16 bytes each)."""
    step = pages * DIGEST_BYTES
    whole = identities[: len(identities) // step * step]
    return list(chain.from_iterable(iter_unpack(f"{step - DIGEST_BYTES}x{DIGEST_BYTES}s", whole)))
