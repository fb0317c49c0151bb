"""Chunks for tests: small, real ones, made from a seed."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np

from services.storage.backends import ChunkKey
from services.storage.chunk_format import ChunkHeader, blob_nbytes, page_identities, payload_view, write_header
from services.storage.chunk_payload import hash_payload
from shared.chunks import chunk_tokens
from shared.ids import chain_root, namespace_digest
from shared.messages.pools import KvGeometry

SMALL = KvGeometry(layers=2, kv_heads=1, head_dim=2, page_size=16, dtype="float16")
"""Its blobs have two blocks."""

HIDDEN_GEOMETRIES = {
    "hidden alone": KvGeometry(
        layers=3, kv_heads=1, head_dim=2, page_size=16, dtype="float16", hidden=6, from_hidden=3
    ),
    "tokens, hidden": KvGeometry(
        layers=4, kv_heads=1, head_dim=2, page_size=16, dtype="bfloat16", hidden=10, absent=1, from_hidden=3
    ),
    "hidden, KV": KvGeometry(layers=3, kv_heads=2, head_dim=4, page_size=1, dtype="float16", hidden=8, from_hidden=1),
    "tokens, hidden, KV": KvGeometry(
        layers=5, kv_heads=2, head_dim=3, page_size=32, dtype="float32", hidden=6, absent=1, from_hidden=2
    ),
    "tokens, KV": KvGeometry(layers=3, kv_heads=2, head_dim=2, page_size=64, dtype="float16", absent=1),
}
"""Shapes of hidden states, by what its layers are restored from, in order."""

SMALL_HIDDEN = KvGeometry(
    layers=4, kv_heads=1, head_dim=4, page_size=16, dtype="float16", hidden=4, absent=1, from_hidden=2
)
"""Its pages have 4 units: two of hidden states, K and V. Its blobs have two blocks."""


@dataclass(frozen=True)
class MadeChunk:
    """A chunk as a storage writes it; ``blob`` begins on a block."""

    header: ChunkHeader
    blob: memoryview

    @property
    def key(self) -> ChunkKey:
        return self.header.key


def make_chain(count: int, *, seed: int, geometry: KvGeometry = SMALL, model: str = "model") -> list[MadeChunk]:
    """The first ``count`` chunks of one sequence: random tokens and random KV or hidden states."""
    random = np.random.default_rng(seed)
    namespace = namespace_digest(model)
    parent, made = chain_root(namespace), []
    tokens_each = chunk_tokens(geometry.page_size)
    for place in range(count):
        blob = memoryview(mmap.mmap(-1, blob_nbytes(geometry)))
        blob[:] = random.bytes(blob.nbytes)  # Also where the header goes: buffers are used again.
        tokens = random.integers(0, 50_000, tokens_each, dtype="<i4").tobytes()
        identities = page_identities(parent, tokens, geometry)
        header = write_header(
            blob,
            namespace=namespace,
            geometry=geometry,
            depth=place * tokens_each,
            parent=parent,
            tokens=tokens,
            checksums=hash_payload(payload_view(blob, geometry), geometry, identities),
        )
        made.append(MadeChunk(header, blob))
        parent = header.identity
    return made


def aligned(nbytes: int) -> memoryview:
    """A writable buffer that begins on a block."""
    return memoryview(mmap.mmap(-1, nbytes))
