"""The published status."""

from services.scheduler.core import decode_state, encode_state, new_state, status
from shared.messages.pools import HIDDEN
from shared.messages.status import StorageBudget
from shared.messages.worker_events import DeviceFacts
from tests.unit.scheduler.core.cell_fixtures import MakeCell, worker_runs
from tests.unit.scheduler.core.fetching import prompt
from tests.unit.scheduler.core.reading_in_part import put_in_parts, sparse_cell
from tests.unit.scheduler.core.saving_hidden import saving_cell


def test_pages_add_up(make_cell: MakeCell) -> None:
    """Free, cached and leased are all there is, in every pool."""
    cell = make_cell(host_pages=20)
    cell.submit([1] * 10, max_tokens=8, ignore_eos=True)
    cell.round()
    cell.submit([2] * 10, max_tokens=8)

    found = status(cell.state, "me")

    assert (found.scheduler_id, found.seq, found.page_size) == ("me", cell.seq, 4)
    assert [(pool.owner, pool.tier, pool.total) for pool in found.pools] == [
        ("worker-0", "device", 32),
        ("storage", "host", 20),
    ]
    assert all(pool.free + pool.cached + pool.leased == pool.total for pool in found.pools)
    assert (found.running, found.queued, found.storages) == (2, 0, ("storage",))


def test_the_context_is_the_longest_that_a_worker_serves(make_cell: MakeCell) -> None:
    """Bounded by the model's context and by the pool."""
    cell = make_cell(workers=0)
    assert status(cell.state, "me").max_context == 0
    cell.add_worker("small", pages=8)
    cell.add_worker("large", pages=100, max_context=300)

    assert status(cell.state, "me").max_context == 300


def test_an_empty_cell_has_a_status() -> None:
    """Before anybody joined there is something to publish."""
    assert status(new_state(), "me").workers == ()


def test_hidden_states_are_counted_for_themselves(make_cell: MakeCell) -> None:
    """The hidden pool is a pool of its own; chunks and saves are counted in either form."""
    cell = saving_cell(make_cell)
    cell.submit(prompt(2), max_tokens=1)
    worker_runs(cell)
    (pool,) = [pool for pool in status(cell.state, "me").pools if pool.tier == HIDDEN]
    assert (pool.owner, pool.total, pool.cached, pool.leased) == ("storage", 64, 0, 4)
    assert status(cell.state, "me").saves == 1
    cell.drain()

    found = status(cell.state, "me")

    assert (found.chunks, found.hidden_chunks, found.chunks_in_all, found.saves) == (0, 2, 2, 0)


def test_chunks_that_can_be_read_in_part_are_counted_twice(make_cell: MakeCell) -> None:
    """They are chunks of KV, of which there is a second copy."""
    cell = sparse_cell(make_cell)
    put_in_parts(cell, prompt(3))

    found = status(cell.state, "me")

    assert (found.chunks, found.sparse_chunks, found.chunks_in_all) == (3, 3, 3)


def test_what_pools_take_and_may_take_is_told(make_cell: MakeCell) -> None:
    """Data type and bytes of a page as workers have them, the storage's budgets, and a pool that is being made."""
    cell = make_cell(host_pages=20)
    geometry = cell.state.geometry
    storage = cell.state.storages["storage"]
    found = status(cell.state, "me")

    assert geometry is not None
    assert (found.dtype, found.page_bytes) == (geometry.dtype, geometry.page_bytes)
    assert found.budgets == (
        StorageBudget(storage_id="storage", host=storage.host_bytes, disk=storage.disk.budget_bytes, awaits_pool=False),
    )
    storage.pool = None
    assert status(cell.state, "me").budgets[0].awaits_pool


def test_the_device_of_a_worker_is_told(make_cell: MakeCell) -> None:
    """As it said when it joined; a worker of an earlier release said nothing."""
    cell = make_cell()
    device = DeviceFacts(kind="cuda", name="H", ranks=2)
    assert status(cell.state, "me").workers[0].device is None
    cell.state.workers["worker-0"].device = device

    assert status(decode_state(encode_state(cell.state)), "me").workers[0].device == device
