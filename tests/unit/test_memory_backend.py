"""The tier in memory beyond what every tier guarantees."""

from __future__ import annotations

import pytest

from shared.errors import CapacityError
from tests.chunk_makers import make_chain
from tests.memory_backend import MemoryBackend

CHUNKS = make_chain(3, seed=61)
NBYTES = CHUNKS[0].blob.nbytes


def test_it_holds_no_more_than_its_bound() -> None:
    """Bytes are counted as chunks come and go, so that room that was given back can be used again."""
    backend = MemoryBackend(max_bytes=2 * NBYTES)
    first, second, third = CHUNKS
    for chunk in (first, second):
        assert backend.put(chunk.key, chunk.blob, stripe=0, timeout_s=0)

    with pytest.raises(CapacityError):
        backend.put(third.key, third.blob, stripe=0, timeout_s=0)
    backend.delete(first.key, timeout_s=0)

    assert backend.put(third.key, third.blob, stripe=0, timeout_s=0)


def test_a_chunk_can_be_quarantined() -> None:
    """What failed verification is gone, and counted once."""
    backend = MemoryBackend(max_bytes=2 * NBYTES)
    backend.put(CHUNKS[0].key, CHUNKS[0].blob, stripe=0, timeout_s=0)

    assert backend.quarantine(CHUNKS[0].key, timeout_s=0)
    assert not backend.quarantine(CHUNKS[0].key, timeout_s=0)

    assert backend.quarantined == 1
    assert list(backend.entries()) == []
