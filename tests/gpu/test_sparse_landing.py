"""What storages read arrives on a GPU through pinned memory: verified there, and not overwritten before it crossed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import xxhash

from services.worker.importance.landing import Landing
from shared.errors import SparsePrefixLost

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SLOT_BYTES = 2**20


def test_two_threads_land_one_slot_after_another() -> None:
    """The slot is overwritten as soon as its bytes are landed, as it is when it goes to the next read."""
    landing = Landing(torch.device("cuda"), SLOT_BYTES)

    def land(seed: int) -> bool:
        generator = np.random.default_rng(seed)
        slot = np.empty(SLOT_BYTES, dtype=np.uint8)
        landed = []
        for number in range(20):
            slot[:] = generator.integers(0, 256, SLOT_BYTES, dtype=np.uint8)
            nbytes = SLOT_BYTES - number
            landed.append(
                (slot[:nbytes].copy(), landing.land(slot[:nbytes], xxhash.xxh3_64_intdigest(slot[:nbytes].data)))
            )
            slot[:] = 0
        return all(np.array_equal(found.cpu().numpy(), expected) for expected, found in landed)

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(land, range(2))) == [True, True]


def test_altered_bytes_do_not_land() -> None:
    """And the next ones do."""
    landing = Landing(torch.device("cuda"), SLOT_BYTES)
    slot = np.arange(100, dtype=np.uint8)
    checksum = xxhash.xxh3_64_intdigest(slot.data)

    with pytest.raises(SparsePrefixLost, match="altered"):
        landing.land(slot, checksum ^ 1)

    assert landing.land(slot, checksum).tolist() == list(range(100))
