"""Storages come and go."""

from services.scheduler.core import status
from shared.messages.cell_events import CellConfig, CellConfigured
from shared.messages.storage_events import HostPoolCreated, StorageLeft
from shared.messages.storage_plans import CreateHostPool
from shared.messages.worker_plans import AttachHostPool, DetachHostPool
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders


def test_a_lost_storage_takes_its_copies_along(make_cell: MakeCell) -> None:
    """Its residency vanishes and workers unmap it; on return it starts empty."""
    cell = make_cell(pages=12, host_pages=60)
    for number in range(3):
        cell.serve([number] * 40, max_tokens=1)

    cell.lose_storage("storage")

    assert len(orders(cell.outputs[-1], DetachHostPool)) == 1
    assert [pool.tier for pool in status(cell.state, "x").pools] == ["device"]
    cell.add_storage("storage")
    cell.drain()
    assert [pool.cached for pool in status(cell.state, "x").pools if pool.tier == "host"] == [0]
    assert sorted(cell.workers["worker-0"].hosts) == ["storage"]


def test_a_storage_that_leaves_is_not_lost(make_cell: MakeCell) -> None:
    """A rollout stops every process, and is no reason for an alert."""
    cell = make_cell(pages=12, host_pages=60)
    storage = cell.storages.pop("storage")

    cell.feed(StorageLeft(storage_id="storage", incarnation=storage.incarnation))

    counters = cell.state.counters
    assert (counters["storages_left"], counters.get("storages_lost", 0)) == (1, 0)


def test_a_pool_that_could_not_be_made_is_done_without(make_cell: MakeCell) -> None:
    """The cell serves from the device alone."""
    cell = make_cell()
    storage = cell.add_storage("storage")

    outputs = cell.feed(
        HostPoolCreated(storage_id="storage", incarnation=storage.incarnation, handle=None, error="no memory")
    )

    assert orders(outputs, AttachHostPool) == []
    assert cell.state.counters["host_pools_refused"] == 1
    cell.submit([1] * 8)
    storage.inbox.clear()
    cell.drain()
    assert list(cell.gateways["gateway"].ended.values()) == ["finished"]


def test_the_host_tier_can_be_switched(make_cell: MakeCell) -> None:
    """Off, no pool is asked for and none used; on, the pool is made."""
    cell = make_cell(host_tier=False, host_pages=60, pages=12)
    assert cell.storages["storage"].pool is None

    outputs = cell.feed(CellConfigured(config=CellConfig(host_tier=True, lease_tokens=4)))

    assert len(orders(outputs, CreateHostPool)) == 1
    cell.drain()
    for number in range(2):
        cell.serve([number] * 40, max_tokens=1)
    assert cell.state.counters["backups_done"] > 0
    (pool,) = (storage.pool for storage in cell.state.storages.values())
    assert pool is not None
    assert cell.state.counters["backed_up_pages"] == pool.total - pool.free
