"""What another node has on its disk alone: it fetches that into its host memory, and lends it."""

import pytest

from services.scheduler.core.rates import recompute_us
from shared.messages.cell_events import FlushCache
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell
from tests.unit.scheduler.core.fetching import CHUNK, PAGE, host_tokens, prompt
from tests.unit.scheduler.core.sharing_nodes import KEY, A, B, fetches, two_nodes


@pytest.fixture
def make_nodes(make_cell: MakeCell) -> MakeCell:
    """Two nodes; the first has a prompt of three chunks on its disk and nowhere else, and no worker."""

    def make(**settings: object) -> CellModel:
        cell = two_nodes(make_cell, **{"disk_chunks": 40, "disk_writes": "through"} | settings)  # type: ignore[arg-type]
        cell.lose_worker("worker-a")
        cell.feed(FlushCache(call_id="host", tiers=("device", "host")))
        cell.drain()
        assert len(cell.disks[A].chunks) == 3
        return cell

    return make


def test_it_comes_by_way_of_the_other_nodes_host_memory(make_nodes: MakeCell) -> None:
    """One fetch there, one here, and nothing is computed."""
    cell = make_nodes()
    cell.serve(prompt(3))

    assert [order.lender is not None for order in fetches(cell)] == [False, True]
    assert cell.admitted[-1].cached_tokens == 3 * CHUNK
    assert cell.state.counters["raises_started"] == 1
    assert cell.state.counters["raised_tokens"] == cell.state.counters["fetched_tokens_lent"] == 3 * CHUNK
    assert host_tokens(cell, prompt(3), A) == host_tokens(cell, prompt(3), B) == 3 * CHUNK


def test_one_reading_is_for_all_who_wait_for_it(make_nodes: MakeCell) -> None:
    """Of whichever node."""
    cell = make_nodes()
    cell.submit(prompt(3))
    cell.submit([*prompt(3), 9])
    cell.add_worker("worker-a", node="node", pages=40)
    cell.drain()

    assert sum(order.lender is None for order in fetches(cell)) == 1


def test_ones_own_disk_is_read_first(make_nodes: MakeCell) -> None:
    """It has the first chunk."""
    cell = make_nodes()
    cell.serve(prompt(1), max_tokens=1)
    assert len(cell.disks[B].chunks) == 1
    cell.feed(FlushCache(call_id="again", tiers=("device", "host")))
    cell.drain()
    before = len(fetches(cell))

    cell.serve(prompt(3))

    first = fetches(cell)[before]
    assert first.lender is None
    assert len(first.host_pages) // 4 == CHUNK // PAGE
    assert cell.admitted[-1].cached_tokens == 3 * CHUNK


def test_a_disk_that_has_lost_it_is_asked_once(make_nodes: MakeCell) -> None:
    """The request computes."""
    cell = make_nodes()
    cell.disks[A].chunks.clear()
    cell.serve(prompt(3))

    assert len(fetches(cell)) == 1
    assert len(cell.state.storages[A].disk.chunks) == 2  # The first is known to be gone.


def test_what_there_is_of_it_comes(make_nodes: MakeCell) -> None:
    """The disk has lost the last chunk."""
    cell = make_nodes()
    del cell.disks[A].chunks[list(cell.disks[A].chunks)[2]]
    cell.serve(prompt(3))

    assert cell.admitted[-1].cached_tokens == 2 * CHUNK


def test_kv_of_a_caller_with_a_key_stays_where_it_is(make_nodes: MakeCell) -> None:
    """In the lender's host memory it would not be encrypted."""
    cell = make_nodes(key_id=KEY)
    cell.serve(prompt(3), key_id=KEY)

    assert fetches(cell) == []


@pytest.mark.parametrize("slow", ["disk", "network"])
def test_computing_is_preferred_where_it_is_faster(make_nodes: MakeCell, slow: str) -> None:
    """The disk and the way from there take their times one after the other."""
    cell = make_nodes()
    rates = {"disk": cell.state.storages[A].fetching.disk_rate, "network": cell.state.storages[B].fetching.lender_rate}
    rates[slow].note(1.0, 1e6)
    cell.state.speed.note_compute(64, 0, 6400)
    cell.serve(prompt(3))

    assert fetches(cell) == []


@pytest.mark.parametrize("slow", ["disk", "network"])
def test_the_one_means_that_is_set_is_taken_however_slow_it_is(make_nodes: MakeCell, slow: str) -> None:
    """As what the node's own disk has: ``restoring`` set to KV weighs nothing, neither the reading nor the loan."""
    cell = make_nodes(restoring="kv")
    rates = {"disk": cell.state.storages[A].fetching.disk_rate, "network": cell.state.storages[B].fetching.lender_rate}
    rates[slow].note(1.0, 1e6)
    cell.state.speed.note_compute(64, 0, 6400)
    cell.serve(prompt(3))

    assert [order.lender is not None for order in fetches(cell)] == [False, True]
    assert cell.admitted[-1].cached_tokens == 3 * CHUNK


def test_a_lender_that_dies_while_it_reads_is_a_miss(make_nodes: MakeCell) -> None:
    """The request computes, and nothing is left of it."""
    cell = make_nodes()
    cell.submit(prompt(3))
    assert len(fetches(cell)) == 1
    cell.lose_storage(A)
    cell.drain()

    assert not cell.state.fetches


def test_a_request_that_leaves_ends_the_reading(make_nodes: MakeCell) -> None:
    """Nobody waits for it any more."""
    cell = make_nodes()
    name = cell.submit(prompt(3))
    cell.cancel(name)
    cell.drain()

    assert cell.state.counters["fetches_cancelled"] == 1


def test_placement_counts_what_another_disk_has(make_nodes: MakeCell) -> None:
    """The request is expected to cost little more than its last tokens."""
    cell = make_nodes()
    cell.state.speed.note_compute(64, 0, 64_000)
    request = cell.state.requests[cell.submit(prompt(3))]

    assert 0 < request.place.cost < recompute_us(cell.state, cell.state.workers["worker-b"], 0, 3 * CHUNK) / 10
