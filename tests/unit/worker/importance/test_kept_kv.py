"""Chosen K and V in pages of the device pool."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from services.worker.importance.kept_kv import KeptInMemory, KeptInPages
from services.worker.kv.device_pool import DevicePool
from shared.errors import InvariantViolated
from shared.messages.pools import KvGeometry
from tests.run_name import shm_prefix

GEOMETRY = KvGeometry(layers=2, kv_heads=3, head_dim=2, page_size=4, dtype="float32")
PAGES = np.array([5, 1], dtype=np.int32)


@pytest.fixture
def pool() -> Iterator[DevicePool]:
    made = DevicePool.create(GEOMETRY, 8, device="cpu", shm_prefix=shm_prefix("kept-kv"))
    made.tensor.copy_(torch.arange(made.tensor.numel()).view(made.tensor.shape))
    yield made
    made.close()


def test_both_ways_give_the_same_between_two_ends(pool: DevicePool) -> None:
    """Tokens before it, what was chosen, tokens behind it; layers may differ in how many they chose."""
    paged, memory = KeptInPages(pool, PAGES), KeptInMemory()
    before, behind = torch.tensor([2, 13]), torch.tensor([31, 9, 0])
    for layer, count in ((0, 6), (1, 0)):
        kv = torch.randn(2, 3, count, 2)
        paged.put(layer, kv)
        memory.put(layer, kv)

        found = paged.between(layer, pool, before, behind)

        assert found.shape == (2, 3, 5 + count, 2)
        assert torch.equal(found[:, :, 2 : 2 + count], kv)
        assert torch.equal(found, memory.between(layer, pool, before, behind))


def test_only_its_pages_are_written(pool: DevicePool) -> None:
    """Six tokens fill page 5 and half of page 1, of one layer."""
    before = pool.tensor.clone()

    KeptInPages(pool, PAGES).put(1, torch.full((2, 3, 6, 2), -1.0))

    changed = (pool.tensor != before).flatten(4).any(dim=4).nonzero().tolist()
    rows = [[5, row] for row in range(4)] + [[1, 0], [1, 1]]
    assert sorted(changed) == sorted([1, half, *row] for half in (0, 1) for row in rows)


def test_more_than_the_leased_room_is_refused(pool: DevicePool) -> None:
    """Nothing is written where nine tokens are to go into two pages of four."""
    before = pool.tensor.clone()

    with pytest.raises(InvariantViolated, match="9 chosen tokens do not fit"):
        KeptInPages(pool, PAGES).put(0, torch.zeros(2, 3, 9, 2))

    assert torch.equal(pool.tensor, before)
