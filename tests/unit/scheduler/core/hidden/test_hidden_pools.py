"""Hidden pools: when they are asked for, who maps them, and what goes with them."""

from typing import Any

import pytest
from msgspec import structs

from services.scheduler.core import status
from shared.chunks import geometry_id
from shared.messages.cell_events import CellConfig, CellConfigured
from shared.messages.pools import HIDDEN, KvGeometry, PoolHandle
from shared.messages.storage_events import ChunksFetched, HostPoolCreated
from shared.messages.storage_plans import CreateHostPool
from shared.messages.worker_plans import AttachHostPool, DetachHostPool
from tests.present import present
from tests.stateful.cell_model import CellModel, geometry
from tests.stateful.model_hidden import COSTS, hidden_geometry
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders, orders_of, worker_runs
from tests.unit.scheduler.core.fetching import PAGE, prompt
from tests.unit.scheduler.core.saving_hidden import hidden_storage, saving_cell

SLOW_TO_PROJECT = structs.replace(COSTS, hidden_us=0.1)
"""On the disk as it is known at first, KV comes back sooner."""


def all_asked(cell: CellModel) -> list[KvGeometry]:
    """Every pool that was asked for, in order."""
    return [order.geometry for order in orders_of(cell, CreateHostPool)]


def asked(cell: CellModel) -> list[KvGeometry]:
    """Every hidden pool that was asked for."""
    return [found for found in all_asked(cell) if found.is_hidden]


def test_it_is_made_after_the_host_pool_and_mapped(make_cell: MakeCell) -> None:
    """Of the geometry that is wanted; a worker that comes later maps it, too."""
    cell = saving_cell(make_cell)

    assert asked(cell) == [hidden_geometry(PAGE)]
    assert sorted(cell.workers["worker-0"].hidden_pools) == ["storage"]
    outputs_before = len(cell.outputs)
    cell.add_worker("worker-1")
    later = orders_of(cell, AttachHostPool, since=outputs_before)
    assert [order.handle.geometry.is_hidden for order in later] == [False, True]
    assert [pool.total for pool in status(cell.state, "x").pools if pool.tier == HIDDEN] == [64]


def join(cell: CellModel, *members: str) -> None:
    """A storage that may keep hidden states and a worker that restores it join, in this order."""
    cell.restoration = COSTS
    for member in members:
        if member == "storage":
            cell.add_storage("storage", pages=40, disk_chunks=100, hidden_pages=64)
        else:
            cell.add_worker("worker-0")


@pytest.mark.parametrize("members", [("storage", "worker"), ("worker", "storage")])
@pytest.mark.parametrize(
    ("settings", "pools"),
    [
        ({"hidden_form": "0/1/0"}, [geometry(PAGE), hidden_geometry(PAGE)]),
        ({"hidden_form": "off"}, [geometry(PAGE)]),
        ({"hidden_form": "0/1/0", "host_tier": False}, []),
    ],
)
def test_members_that_come_before_the_settings_wait_for_them(
    members: tuple[str, str], settings: dict[str, Any], pools: list[KvGeometry]
) -> None:
    """By the defaults every pool would be asked for, and what they decide could not be undone."""
    cell = CellModel(page_size=PAGE)
    join(cell, *members)
    assert all_asked(cell) == []

    for _ in range(2):
        cell.feed(CellConfigured(config=CellConfig(**settings)))
        cell.drain()

    made = [pool.tier for pool in status(cell.state, "x").pools if pool.tier != "device"]
    assert all_asked(cell) == pools
    assert made == ["host", HIDDEN][: len(pools)]


@pytest.mark.parametrize(
    "shape",
    [
        {"hidden_pages": 0},
        {"disk_chunks": 0},
        {"hidden_form": "off"},
        {"costs": None},
        {"hidden_form": "auto", "costs": SLOW_TO_PROJECT},
        {"host_tier": False},
    ],
)
def test_it_is_not_asked_for_without_use_or_room(make_cell: MakeCell, shape: dict[str, Any]) -> None:
    """No budget, nothing below, not wanted, nobody who could restore, not worth it, no host memory at all."""
    settings = {"page_size": PAGE, "host_pages": 40, "disk_chunks": 100, "hidden_pages": 64, "costs": COSTS}

    assert asked(make_cell(**settings | {"hidden_form": "0/1/0"} | shape)) == []


def test_a_worker_that_can_restore_may_come_later(make_cell: MakeCell) -> None:
    """The question is asked anew when one joins, and when settings change."""
    cell = make_cell(page_size=PAGE, host_pages=40, disk_chunks=100, hidden_pages=64, hidden_form="off")
    cell.restoration = COSTS
    cell.add_worker("worker-1")
    assert asked(cell) == []

    cell.feed(CellConfigured(config=CellConfig(hidden_form="0/1/0")))

    assert asked(cell) == [hidden_geometry(PAGE)]
    cell.drain()
    assert present(hidden_storage(cell).hidden.pool).total == 64


def test_a_disk_that_nobody_measured_is_known_after_a_fetch(make_cell: MakeCell) -> None:
    """No form is chosen by a guess; the first fetch that ends is when the speed is found out."""
    room = {"host_pages": 40, "disk_chunks": 100, "hidden_pages": 64}
    cell = make_cell(page_size=PAGE, **room, costs=SLOW_TO_PROJECT, hidden_form="auto", disk_bytes_per_s=0.0)
    assert asked(cell) == []
    storage = hidden_storage(cell)
    storage.fetching.disk_rate.note(1.0, 10.0)

    cell.feed(ChunksFetched(storage_id="storage", incarnation=storage.incarnation, fetch_id=99, chunks=0, is_over=True))

    assert asked(cell) == [hidden_geometry(PAGE)]


def test_a_restarted_storage_is_asked_for_the_form_that_its_disk_holds(make_cell: MakeCell) -> None:
    """Even where the figures say that KV comes back sooner: chunks of a form without a pool would never be found."""
    shape = {"page_size": PAGE, "host_pages": 40, "disk_chunks": 100, "hidden_pages": 64, "costs": SLOW_TO_PROJECT}
    held = geometry_id(geometry(PAGE)) + geometry_id(hidden_geometry(PAGE))

    assert asked(make_cell(**shape, hidden_form="auto")) == []
    assert asked(make_cell(**shape, hidden_form="auto", shapes=held)) == [hidden_geometry(PAGE)]
    assert asked(make_cell(**shape, hidden_form="off", shapes=held)) == []


@pytest.mark.parametrize("shapes", [b"1234567", bytes(8) * 65])
def test_a_senseless_listing_of_geometries_is_ignored(make_cell: MakeCell, shapes: bytes) -> None:
    """It is counted, and the storage joins."""
    cell = make_cell(page_size=PAGE, host_pages=40, disk_chunks=100, hidden_pages=64, costs=COSTS, shapes=shapes)

    assert (hidden_storage(cell).hidden.shapes, cell.state.counters["malformed_inputs"]) == (b"", 1)


def answer(cell: CellModel, **fields: Any) -> list[Any]:
    """The storage says something of its hidden pool."""
    incarnation = cell.storages["storage"].incarnation
    return cell.feed(HostPoolCreated(storage_id="storage", incarnation=incarnation, form=HIDDEN, **fields))


def pool_handle(found: KvGeometry) -> PoolHandle:
    return PoolHandle(kind="shm", layout="page_first", name="x", nbytes=0, pages=8, geometry=found)


@pytest.mark.parametrize(
    "found",
    [
        None,
        geometry(PAGE),
        structs.replace(hidden_geometry(PAGE), layers=2),
        structs.replace(hidden_geometry(PAGE), page_size=16),
        structs.replace(hidden_geometry(PAGE), from_hidden=3),
    ],
)
def test_a_pool_that_could_not_be_made_is_done_without(make_cell: MakeCell, found: KvGeometry | None) -> None:
    """So is one of a geometry that is another cell's, or none at all; and nobody asks again."""
    cell = make_cell(page_size=PAGE, host_pages=40, disk_chunks=100, costs=COSTS, hidden_form="0/1/0")
    storage = hidden_storage(cell)
    storage.hidden.pool_bytes, storage.hidden.is_requested = 1, True

    outputs = answer(cell, handle=None if found is None else pool_handle(found), error="no room")

    assert orders(outputs, AttachHostPool) == []
    assert cell.state.counters["hidden_pools_refused"] == 1
    assert storage.hidden.pool is None
    cell.add_worker("worker-1")
    assert asked(cell) == []


def test_a_pool_that_nobody_asked_for_is_nobodys(make_cell: MakeCell) -> None:
    """Neither is a second one."""
    cell = make_cell(page_size=PAGE, host_pages=40, disk_chunks=100)
    answer(cell, handle=pool_handle(hidden_geometry(PAGE)))
    assert hidden_storage(cell).hidden.pool is None

    other = saving_cell(make_cell)
    answer(other, handle=pool_handle(hidden_geometry(PAGE)))

    assert present(hidden_storage(other).hidden.pool).total == 64
    assert cell.state.counters["stale_inputs"] == other.state.counters["stale_inputs"] == 1


def test_the_first_geometry_stays(make_cell: MakeCell) -> None:
    """Another form is for the storage's next incarnation: its chunks could not be told apart otherwise."""
    cell = saving_cell(make_cell)
    cell.feed(CellConfigured(config=CellConfig(hidden_form="1/0/0")))
    cell.feed(CellConfigured(config=CellConfig(hidden_form="off")))

    assert len(asked(cell)) == 1
    assert present(hidden_storage(cell).hidden.handle).geometry == hidden_geometry(PAGE)


def test_a_lost_storage_takes_leases_and_saves_along(make_cell: MakeCell) -> None:
    """Workers unmap both pools by one order, what they answer is about nothing, and its successor begins anew."""
    cell = saving_cell(make_cell, max_batch_tokens=64)
    cell.submit(prompt(3), max_tokens=1, request_id="saved")
    worker_runs(cell)
    cell.submit(prompt(3, kind=2), max_tokens=1)
    assert cell.state.hidden_saves
    assert cell.state.leases

    cell.lose_storage("storage")

    assert len(orders(cell.outputs[-1], DetachHostPool)) == 1
    assert not cell.state.leases
    assert not cell.state.hidden_saves
    worker_runs(cell)
    assert cell.state.counters["stale_inputs"] == 1
    assert cell.workers["worker-0"].hidden_pools == {}
    cell.add_storage("storage", pages=40, disk_chunks=100, hidden_pages=32)
    cell.drain()
    assert present(hidden_storage(cell).hidden.pool).free == 32


def test_another_geometry_makes_another_pool(make_cell: MakeCell) -> None:
    """While no worker is there, the cell's pages change their shape: what was kept of the old one is useless."""
    cell = saving_cell(make_cell)
    cell.serve(prompt(2), max_tokens=1)
    assert hidden_storage(cell).hidden.chunks
    cell.lose_worker("worker-0")
    cell.page_size = 16
    cell.hidden_disks["storage"].chunks.clear()
    cell.disks["storage"].chunks.clear()

    cell.add_worker("worker-1")

    assert hidden_storage(cell).hidden.chunks == {}
    assert hidden_storage(cell).hidden.pool is None
    cell.drain()
    assert present(hidden_storage(cell).hidden.handle).geometry == hidden_geometry(16)


def test_senseless_profiles_and_limits_count_for_nothing(make_cell: MakeCell) -> None:
    """A worker without a profile serves as any other; a limit below nothing is none."""
    cell = make_cell(page_size=PAGE, host_pages=40, disk_chunks=100, hidden_pages=64, hidden_form="0/1/0", workers=0)
    senseless: tuple[dict[str, Any], ...] = (
        {"token_us": float("nan")},
        {"hidden": -1},
        {"link_bytes_per_us": float("inf")},
    )
    for number, faults in enumerate(senseless):
        cell.restoration = structs.replace(COSTS, **faults)
        cell.add_worker(f"worker-{number}")
        assert cell.state.workers[f"worker-{number}"].restoration is None

    assert cell.state.counters["malformed_inputs"] == 3
    assert asked(cell) == []
