"""Pages of models whose layers are not alike, in parts: what each rank has, and that together they are whole pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from services.storage.pools import open_device_pool
from services.worker.engine.probe import FoundKept
from services.worker.kv.device_pool import DevicePool
from services.worker.kv.movers.batched import BatchedMover
from services.worker.kv.page_memory import PageLayout, PageMemory
from services.worker.kv.planes import HeadsKept, Kept, LatentsKept, NothingKept, SharedKept, StateKept
from services.worker.parallel.division import Share
from services.worker.parallel.group_layout import GroupLayout, group_layout
from services.worker.parallel.group_pool import GroupPool
from services.worker.parallel.parts_mover import PartsMover
from shared.errors import TransportError, UnsupportedModel
from shared.memory import HostPoolView, unlink_all
from tests.run_name import shm_prefix
from tests.unit.worker.parallel.layouts import layout_of, pool_of
from tests.unit.worker.pools import made_loads, neighbour_load

PREFIX = shm_prefix("layouts")
PAGES = 6
ALL = np.arange(PAGES, dtype=np.int32)
KINDS: dict[str, tuple[int, list[Kept]]] = {
    "latents": (4, [LatentsKept(24, 8)] * 3),
    "other heads": (4, [HeadsKept(4, 8, 8), HeadsKept(2, 16, 16), HeadsKept(4, 8, 8), SharedKept(1)]),
    "padded": (2, [HeadsKept(8, 12, 8), HeadsKept(4, 20, 16), NothingKept()]),
    "heads and states": (4, [StateKept(1000), HeadsKept(4, 8, 8), StateKept(52)]),
    "latents and states": (2, [StateKept(333), LatentsKept(24, 8)]),
    "states beside heads": (1, [HeadsKept(4, 8, 8), HeadsKept(4, 8, 8), StateKept(100), StateKept(100)]),
}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """No segment outlives a test."""
    yield
    unlink_all(PREFIX)


def filled(layout: GroupLayout) -> DevicePool:
    """A pool of a worker with one rank, whose layers have random contents."""
    planes = layout.whole
    pool = DevicePool.create(planes.geometry, PAGES, device="cpu", shm_prefix=PREFIX, planes=planes)
    generator = torch.Generator().manual_seed(1)
    for part in planes.parts:
        for half in (pool.k(part.number), pool.v(part.number)):
            half.copy_(torch.randn(half.shape, generator=generator))
    for number, layer in enumerate(planes.layers):
        if isinstance(layer.kept, StateKept):
            states = torch.randint(256, (PAGES, layer.kept.nbytes), generator=generator).to(torch.uint8)
            pool.put_states(number, torch.arange(PAGES), states)
    return pool


def host_of(pool: DevicePool | GroupPool) -> HostPoolView:
    """All pages of a device pool as a storage copies them, over bytes of others."""
    host = HostPoolView.create(PREFIX, pool.geometry, PAGES)
    host.pages[...] = 255
    view = open_device_pool(pool.handle())
    view.copy_run((0, 0, PAGES), host.pages)
    view.close()
    return host


def memory_of(host: HostPoolView) -> PageMemory:
    return PageMemory(PageLayout.page_first(host.geometry, PAGES), array=host.flat_pages())


def loaded(layout: GroupLayout, host: HostPoolView) -> tuple[GroupPool, PartsMover]:
    """A group's pool with the pages of ``host``."""
    pool = pool_of(layout, PAGES, PREFIX)
    mover = PartsMover(layout.whole.geometry, pool.parts, BatchedMover)
    mover.load(memory_of(host), range(layout.whole.geometry.layers), ALL, ALL)
    return pool, mover


def heads_of(pool: DevicePool, layer: int) -> torch.Tensor:
    """K and V of all heads of a layer, [2, pages, page_size, heads, dim]."""
    parts = pool.planes.parts_of(layer)
    return torch.stack([torch.cat([half(part.number) for part in parts], dim=2) for half in (pool.k, pool.v)])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_gets_its_heads_and_all_of_what_ranks_share(kind: str, ranks: int) -> None:
    """Of pages that a worker with one rank computed."""
    page_size, kept = KINDS[kind]
    layout = layout_of(kept, ranks, page_size)
    single = filled(layout)

    pool, _ = loaded(layout, host_of(single))

    for number, layer in enumerate(layout.whole.layers):
        for rank, part in enumerate(pool.parts):
            if isinstance(layer.kept, StateKept):
                every = torch.arange(PAGES)
                assert torch.equal(part.pool.states(number, every), single.states(number, every))
            elif isinstance(layer.kept, HeadsKept):
                heads = Share(rank, ranks).kv_heads(layer.kept.heads)
                expected = heads_of(single, number)[:, :, :, heads.start : heads.stop]
                assert torch.equal(heads_of(part.pool, number), expected)
            elif isinstance(layer.kept, LatentsKept):
                assert torch.equal(heads_of(part.pool, number), heads_of(single, number))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_group_gives_back_is_what_one_rank_would_have(kind: str, ranks: int) -> None:
    """To a storage, by its own mover, and to a neighbour: the same bytes, with zeros where pages hold nothing."""
    page_size, kept = KINDS[kind]
    layout = layout_of(kept, ranks, page_size)
    single = filled(layout)
    host = host_of(single)
    pool, mover = loaded(layout, host)
    into = HostPoolView.create(PREFIX, pool.geometry, PAGES)
    into.pages[...] = 255

    mover.store(memory_of(into), range(pool.geometry.layers), ALL, ALL[::-1].copy())

    assert (host_of(pool).pages == host.pages).all()
    assert (into.pages[::-1] == host.pages).all()
    assert (lent(pool, layout).pages == host.pages).all()


def lent(pool: GroupPool, layout: GroupLayout) -> HostPoolView:
    """What a worker with one rank has of the group's pages, as its neighbour."""
    planes = layout.whole
    own = DevicePool.create(planes.geometry, PAGES, device="cpu", shm_prefix=PREFIX, planes=planes)
    loads = made_loads(planes.geometry, PAGES, BatchedMover(own))
    loads.neighbours.attach("w1", "inc-1", pool.handle())
    assert not loads.start([neighbour_load(ALL.tolist(), ALL.tolist())]).finish().failures
    loads.close()
    return host_of(own)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_of_a_part_waits_for_units_of_whole_pages(kind: str) -> None:
    """Those that bring the last of it."""
    page_size, kept = KINDS[kind]
    layout = layout_of(kept, 2, page_size)

    waits = [layout.part.last_unit(number) for number in range(len(layout.whole.layers))]

    assert waits == [layout.whole.last_unit(number) for number in range(len(layout.whole.layers))]
    assert not layout.part.is_identity
    assert not layout.is_by_heads


def test_ranks_have_a_part_of_k_and_v_and_all_of_the_rest() -> None:
    """Bytes of a page in all ranks together count towards the pool of a group."""
    alike = layout_of([HeadsKept(4, 8, 8)] * 3, 2, 16)
    latents = layout_of([LatentsKept(24, 8)] * 2, 2, 16)

    assert alike.is_by_heads
    assert alike.group_page_bytes == alike.whole.geometry.page_bytes == 2 * alike.part.geometry.page_bytes
    assert latents.group_page_bytes == 2 * latents.whole.geometry.page_bytes
    assert [len(latents.read_spans(rank)) for rank in (0, 1)] == [2, 0]


def test_where_nobody_chose_pages_are_as_large_as_with_one_rank() -> None:
    """Although a rank has fewer heads, which would want more tokens of a page."""
    kept: Sequence[Kept] = [StateKept(16_384), HeadsKept(4, 32, 32)]

    sizes = [layout_of(kept, ranks, 0).whole.geometry.page_size for ranks in (1, 2, 4)]

    assert sizes == [16, 16, 16]
    assert layout_of(kept, 1, 0).whole == layout_of(kept, 4, 0).whole


def test_other_heads_than_the_configuration_says_are_refused() -> None:
    """By layer."""
    config = SimpleNamespace(model_type="made", num_hidden_layers=2, num_key_value_heads=2)
    found = FoundKept((HeadsKept(2, 8, 8), HeadsKept(1, 16, 16)), {}, "float32")

    with pytest.raises(UnsupportedModel, match="layer 0 of made has 2 KV heads in a rank, not 1"):
        group_layout(found, config, 2, 16)


@pytest.mark.parametrize("change", [{"first": 99}, {"own_offset": 10**6}, {"rows": 7}, {"nbytes": 0}, {"offset": -1}])
def test_a_handle_whose_spans_leave_its_pages_is_refused(change: dict[str, int]) -> None:
    """Before anything is mapped."""
    handle = pool_of(layout_of(KINDS["other heads"][1], 2, 4), PAGES, PREFIX).handle()
    part = handle.parts[0]
    odd = msgspec.structs.replace(part, spans=(msgspec.structs.replace(part.spans[0], **change), *part.spans[1:]))

    with pytest.raises(TransportError, match="outside of its pages"):
        open_device_pool(msgspec.structs.replace(handle, parts=(odd, *handle.parts[1:])))
