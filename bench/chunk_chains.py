"""Chunks for benchmarks of the tiers: sequences of random tokens with random KV."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np

from services.storage.backends import ChunkKey
from services.storage.chunk_format import blob_nbytes, page_identities, payload_view, write_header
from services.storage.chunk_payload import hash_payload
from shared.chunks import chunk_tokens
from shared.ids import chain_root, namespace_digest
from shared.messages.pools import KvGeometry


def random_chain(
    geometry: KvGeometry, random: np.random.Generator, count: int, namespace: str = "bench"
) -> Iterator[tuple[ChunkKey, bytes, memoryview]]:
    """The first ``count`` chunks of one sequence: name, identities of the pages, and blob, which begins on a block."""
    parent, digest = chain_root(namespace_digest(namespace)), namespace_digest(namespace)
    tokens_each = chunk_tokens(geometry.page_size)
    for place in range(count):
        blob = memoryview(mmap.mmap(-1, blob_nbytes(geometry)))
        payload = payload_view(blob, geometry)
        payload[:] = random.bytes(payload.nbytes)
        tokens = random.integers(0, 50_000, tokens_each, dtype="<i4").tobytes()
        identities = page_identities(parent, tokens, geometry)
        header = write_header(
            blob,
            namespace=digest,
            geometry=geometry,
            depth=place * tokens_each,
            parent=parent,
            tokens=tokens,
            checksums=hash_payload(payload, geometry, identities),
        )
        parent = header.identity
        yield header.key, identities, blob
