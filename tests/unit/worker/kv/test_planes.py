"""The plane map: which planes each layer owns, how wide they are, and what a page costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.kv.device_pool import DevicePool
from services.worker.kv.planes import (
    HeadsKept,
    Kept,
    LatentsKept,
    NothingKept,
    SharedKept,
    StateKept,
    identity_map,
    map_planes,
)
from shared.errors import InvariantViolated, UnsupportedModel
from shared.messages.pools import KvGeometry
from tests.run_name import shm_prefix

KEPT = st.one_of(
    st.builds(HeadsKept, st.integers(1, 6), st.integers(1, 12), st.integers(1, 12)),
    st.builds(LatentsKept, st.integers(1, 32), st.integers(0, 8)),
    st.builds(StateKept, st.integers(1, 5000)),
    st.just(NothingKept()),
)


def test_layers_that_are_alike_have_the_identity_map() -> None:
    """The geometry of an ordinary model is the one that it has always had, and its map changes nothing."""
    planes = map_planes([HeadsKept(4, 64, 64)] * 3, 16, "bfloat16")

    assert planes.geometry == KvGeometry(layers=3, kv_heads=4, head_dim=64, page_size=16, dtype="bfloat16")
    assert planes.is_identity
    assert planes == identity_map(planes.geometry)
    assert [(part.k_plane, part.v_plane) for part in planes.parts] == [(0, 1), (2, 3), (4, 5)]
    assert planes.padding_bytes == 0


def test_layers_of_other_heads_take_whole_heads_to_a_plane() -> None:
    """Of 16 heads of 256 and 4 of 512 the first lie in two planes each, and nothing is lost."""
    planes = map_planes([HeadsKept(16, 256, 256), HeadsKept(4, 512, 512)], 16, "float32")

    assert (planes.width, planes.geometry.layers) == (2048, 3)
    assert not planes.is_identity
    assert [(part.first_head, part.heads, part.k_plane, part.v_plane) for part in planes.parts_of(0)] == [
        (0, 8, 0, 1),
        (8, 8, 2, 3),
    ]
    assert [(part.first_head, part.heads, part.k_plane) for part in planes.parts_of(1)] == [(0, 4, 4)]
    assert planes.geometry.token_bytes == 2 * 4 * (16 * 256 + 4 * 512)


def test_latents_are_one_plane_and_two_layers_share_a_unit() -> None:
    """Of three layers with latents of 512 + 64 values a page has two units, the last half of which is empty."""
    planes = map_planes([LatentsKept(512, 64)] * 3, 16, "bfloat16")

    assert (planes.width, planes.geometry.layers) == (576, 2)
    assert [planes.last_unit(layer) for layer in range(3)] == [0, 0, 1]
    assert planes.geometry.token_bytes == 4 * 576 * 2
    assert planes.padding_bytes == 16 * 576 * 2


def test_sizes_of_a_large_model_cost_what_the_documents_say() -> None:
    """With 61 layers of 512 + 64 values DeepSeek V3 keeps 71,424 bytes of a token."""
    assert map_planes([LatentsKept(512, 64)] * 61, 16, "bfloat16").geometry.token_bytes == 62 * 576 * 2 == 71_424


def test_the_narrower_of_k_and_v_is_padded() -> None:
    """K of 192 and V of 128 values a head cost as much as 192 each, and the map says what is lost."""
    planes = map_planes([HeadsKept(4, 192, 128)] * 2, 16, "float32")

    assert planes.geometry.token_bytes == 2 * 2 * 4 * 192 * 4
    assert planes.padding_bytes == 16 * 2 * 4 * (192 - 128) * 4


def test_a_layer_that_shares_reads_the_planes_of_its_source() -> None:
    """It owns none, and waits for those of its source."""
    planes = map_planes([HeadsKept(2, 8, 8), HeadsKept(1, 32, 32), SharedKept(0), NothingKept()], 4, "float32")

    assert planes.parts_of(2) == planes.parts_of(0)
    assert planes.last_unit(2) == planes.last_unit(0) < planes.last_unit(1)
    assert planes.last_unit(3) == -1
    assert planes.parts_of(3) == ()


def test_what_keeps_nothing_is_refused() -> None:
    """A model without anything to keep has no page."""
    with pytest.raises(UnsupportedModel, match="nothing to cache"):
        map_planes([NothingKept()], 16, "float32")


@given(st.lists(KEPT, min_size=1, max_size=6), st.sampled_from([1, 4, 16]), st.sampled_from(["float32", "bfloat16"]))
def test_no_plane_is_owned_twice_and_everything_fits(kept: Sequence[Kept], page_size: int, dtype: str) -> None:
    """Planes of a page are dealt out in the order of the layers, without gaps, and hold all that is kept."""
    if all(isinstance(each, NothingKept) for each in kept):
        return
    planes = map_planes(kept, page_size, dtype)
    owned = [layer for layer in planes.layers if layer.planes]

    assert all(one.first + one.planes == other.first for one, other in pairwise(owned))
    assert 2 * planes.geometry.layers - owned[-1].first - owned[-1].planes in (0, 1)
    assert [part.number for part in planes.parts] == list(range(len(planes.parts)))
    for layer in planes.layers:
        if isinstance(layer.kept, StateKept):
            assert (layer.planes - 1) * planes.geometry.half_bytes < layer.kept.nbytes
            assert layer.kept.nbytes <= layer.planes * planes.geometry.half_bytes
        if isinstance(layer.kept, HeadsKept):
            assert sum(part.heads for part in layer.parts) == layer.kept.heads
        assert all(part.heads * part.dim <= planes.width for part in layer.parts)
    assert planes.padding_bytes >= 0


@given(st.lists(KEPT, min_size=1, max_size=4))
def test_no_width_of_a_layer_loses_less(kept: Sequence[Kept]) -> None:
    """The width is at least as good as one that fits the widest layer."""
    rows = [each for each in kept if isinstance(each, HeadsKept | LatentsKept)]
    if not rows:
        return
    planes = map_planes(rows, 4, "float32")
    widest = max(each.heads * each.dim if isinstance(each, HeadsKept) else each.values for each in rows)
    count = sum(2 if isinstance(each, HeadsKept) else 1 for each in rows)

    assert planes.geometry.token_bytes <= 4 * widest * (count + count % 2)


MIXED = map_planes([StateKept(300), HeadsKept(3, 8, 4), LatentsKept(12, 4), NothingKept()], 4, "float32")


@pytest.fixture
def pool() -> Iterator[DevicePool]:
    made = DevicePool.create(MIXED.geometry, 5, device="cpu", shm_prefix=shm_prefix("planes"), planes=MIXED)
    yield made
    made.close()


def test_parts_are_views_of_their_planes(pool: DevicePool) -> None:
    """K and V of every part are where the map says, and nowhere else in the pool's memory."""
    planes = pool.tensor.view(2 * MIXED.geometry.layers, 5, 4, MIXED.width)
    for part in MIXED.parts:
        for half, plane in ((pool.k(part.number), part.k_plane), (pool.v(part.number), part.v_plane)):
            before = planes.clone()
            half[3, 2] = 7.0

            assert half.shape == (5, 4, part.heads, part.dim)
            assert (planes[plane, 3, 2, : part.heads * part.dim] == 7.0).all()
            assert (planes != before).sum() == part.heads * part.dim
            half[3, 2] = 0.0


def test_states_are_kept_per_page_to_the_byte(pool: DevicePool) -> None:
    """What is put for some pages of a layer is what they give back, and planes of other layers are left alone."""
    states = torch.randint(1, 256, (2, 300), dtype=torch.uint8)
    pages = torch.tensor([4, 1])
    pool.put_states(0, pages, states)

    assert torch.equal(pool.states(0, pages), states)
    assert not pool.states(0, torch.tensor([0, 2, 3])).any()
    assert not any(pool.k(part.number).any() or pool.v(part.number).any() for part in MIXED.parts)


def test_a_layer_without_state_has_none_to_give(pool: DevicePool) -> None:
    """Layers of attention, and layers that keep nothing, are refused."""
    for layer in (1, 3):
        with pytest.raises(InvariantViolated, match="keeps no state"):
            pool.states(layer, torch.tensor([0]))
