"""Loads from host memory."""

from services.scheduler.core import status
from shared.messages.cell_events import FlushCache
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell, loads_of


def push_out(cell: CellModel) -> None:
    """Fill the device with other prompts, so that what was there moves to the host; then empty the device."""
    for other in range(cell.state.workers["worker-0"].pool.total // 10 + 1):
        cell.serve([500 + other] * 40, max_tokens=1)
    cell.feed(FlushCache(call_id="call", tiers=("device",)))


def test_a_prefix_that_was_evicted_is_loaded_back(make_cell: MakeCell) -> None:
    """The first batch of the request carries the load, and the rest is computed."""
    cell = make_cell(pages=14, host_pages=60)
    cell.serve(list(range(40)), max_tokens=1)
    push_out(cell)

    cell.serve([*range(40), 7], max_tokens=1)

    again = cell.admitted[-1]
    assert (again.device_tokens, again.host_tokens, again.cached_tokens) == (0, 40, 40)
    (load,) = loads_of(cell)
    assert len(load.identities) == 16 * 10
    assert load.device_pages == again.pages[:40]


def test_a_short_host_hit_is_recomputed(make_cell: MakeCell) -> None:
    """Below ``min_host_load_tokens`` a load is not worth it."""
    cell = make_cell(pages=14, host_pages=60, min_host_load_tokens=41)
    cell.serve(list(range(40)), max_tokens=1)
    push_out(cell)

    cell.serve([*range(40), 7], max_tokens=1)

    assert cell.admitted[-1].cached_tokens == 0
    assert loads_of(cell) == []


def test_a_rotten_page_is_quarantined_and_its_request_recomputes(make_cell: MakeCell) -> None:
    """The answer is right, the copy is never matched again, and the pages return."""
    cell = make_cell(pages=14, host_pages=60)
    cell.serve(list(range(40)), max_tokens=3, request_id="first")
    push_out(cell)
    pool = cell.storages["storage"].pool
    assert pool is not None
    for page in pool.memory.values():
        page.is_corrupt = page.tokens[0] < 40

    cell.serve(list(range(40)), max_tokens=3, request_id="again")

    assert cell.state.counters["loads_failed"] == 1
    assert cell.state.counters["quarantined_pages"] > 0
    assert cell.gateways["gateway"].ended["again"] == "finished"
    assert cell.admitted[-1].host_tokens == 0
    assert cell.admitted[-1].attempt == 2


def test_a_second_request_waits_for_a_load_under_way(make_cell: MakeCell) -> None:
    """It neither reads pages that are not there yet nor computes them again."""
    cell = make_cell(pages=30, host_pages=60)
    cell.serve(list(range(40)), max_tokens=1)
    push_out(cell)
    cell.submit([*range(40), 7], max_tokens=1, request_id="one")
    cell.submit([*range(40), 8], max_tokens=1, request_id="two")
    cell.submit([77] * 4, max_tokens=1, request_id="other")

    assert [order.request_id for order in cell.admitted[-2:]] == ["one", "other"]
    cell.drain()
    assert cell.admitted[-1].request_id == "two"
    assert (cell.admitted[-1].device_tokens, cell.admitted[-1].host_tokens) == (40, 0)
    assert len(loads_of(cell)) == 1


def test_a_load_whose_request_left_before_it_ran_is_not_trusted(make_cell: MakeCell) -> None:
    """Pages stay untouched until the batch is answered, and then they are free, not cached."""
    cell = make_cell(pages=14, host_pages=60)
    cell.serve(list(range(40)), max_tokens=1)
    push_out(cell)
    name = cell.submit([*range(40), 7], max_tokens=1)
    cell.cancel(name)
    worker = cell.workers["worker-0"]
    batch, abort = worker.inbox.pop(), worker.inbox.pop()
    worker.inbox += [batch, abort]
    worker.step()
    cell.deliver(worker)

    assert cell.gateways["gateway"].ended[name] == "finished"
    assert cell.state.workers["worker-0"].pool.leased == 10
    cell.drain()
    assert cell.state.counters["loads_failed"] == 1
    assert cell.state.workers["worker-0"].pool.cached == 0
    assert all(pool.leased == 0 for pool in status(cell.state, "x").pools)


def test_a_load_survives_the_loss_of_its_storage(make_cell: MakeCell) -> None:
    """What the worker has read is good; the answer is right either way."""
    cell = make_cell(pages=14, host_pages=60)
    cell.serve(list(range(40)), max_tokens=2)
    push_out(cell)
    cell.submit(list(range(40)), max_tokens=2, request_id="again")

    cell.lose_storage("storage")
    cell.drain()

    assert cell.gateways["gateway"].ended["again"] == "finished"
