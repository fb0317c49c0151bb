"""What waiting requests count on in host memory, where there is a disk below it."""

import pytest

from shared.messages.storage_plans import FetchChunks
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders_of
from tests.unit.scheduler.core.fetching import CHUNK, PAGE, host_tokens, prompt, put_on_disk


@pytest.fixture
def cell(make_cell: MakeCell) -> CellModel:
    """Host memory for two of the prompts and a half; the device has room for one and runs one at a time."""
    return make_cell(
        page_size=PAGE,
        pages=12,
        host_pages=16,
        disk_chunks=100,
        prefetch_fraction=1.0,
        max_running=1,
        disk_writes="off",
        reserve_fraction=0.0,
        prefetch_wait="full",
    )


def queue(cell: CellModel, *kinds: int) -> list[str]:
    """Something runs; behind it stand requests whose prompts are on the disk."""
    for kind in kinds:
        put_on_disk(cell, prompt(3, kind=kind))
    cell.submit(prompt(1, kind=9))
    return [cell.submit(prompt(3, kind=kind), max_tokens=1) for kind in kinds]


def let_fetches_end(cell: CellModel) -> None:
    """The storage does all that it was told to; the worker does nothing."""
    storage = cell.storages["storage"]
    while storage.step() or storage.fetch() or storage.outbox:
        cell.deliver(storage)


def held(cell: CellModel) -> dict[str, int]:
    """Nodes that the storage holds, by request."""
    return cell.state.storages["storage"].fetching.held


def test_a_fetch_evicts_nothing_that_an_earlier_request_counts_on(cell: CellModel) -> None:
    """Each prompt is read from the disk once, and none is computed."""
    names = queue(cell, 1, 2, 3)

    let_fetches_end(cell)

    assert list(held(cell)) == names
    assert [host_tokens(cell, prompt(3, kind=kind)) for kind in (1, 2)] == [3 * CHUNK] * 2
    cell.drain()
    assert sum(len(order.identities) // 16 for order in orders_of(cell, FetchChunks)) == 3 * 6
    assert [order.disk_tokens for order in cell.admitted[1:]] == [3 * CHUNK] * 3
    assert held(cell) == {}


def test_what_went_for_a_request_that_runs_first_is_fetched_again(cell: CellModel) -> None:
    """One of a higher priority takes what those before it in order of arrival count on, from the last of them."""
    names = queue(cell, 1, 2)
    let_fetches_end(cell)
    put_on_disk(cell, prompt(3, kind=3))
    urgent = cell.serve(prompt(3, kind=3), max_tokens=1, priority=5)

    cached = {order.request_id: order.host_tokens + order.disk_tokens for order in cell.admitted[1:]}
    assert cached == dict.fromkeys([*names, urgent], 3 * CHUNK)
    assert cell.state.counters["held_copies_given_up"] > 0


def test_what_a_request_that_ends_counted_on_may_go(cell: CellModel) -> None:
    """Nothing is held for one that was cancelled, and what it had is given to the next."""
    first, second, third = queue(cell, 1, 2, 3)
    let_fetches_end(cell)

    cell.cancel(first)
    let_fetches_end(cell)

    assert list(held(cell)) == [second, third]
    assert [host_tokens(cell, prompt(3, kind=kind)) for kind in (2, 3)] == [3 * CHUNK] * 2
    cell.drain()


def test_copies_are_held_where_nothing_is_below_host_memory(make_cell: MakeCell) -> None:
    """What goes there has to be computed: copies that nobody waits for go before, though they are newer."""
    cell = make_cell(page_size=PAGE, pages=14, host_pages=20, max_running=1, policy="lru", reserve_fraction=0.0)
    for kind in (1, 2, 3):
        cell.serve(prompt(3, kind=kind), max_tokens=1)
    assert host_tokens(cell, prompt(3, kind=1)) == 3 * CHUNK
    cell.submit(prompt(3, kind=4), max_tokens=1)
    waiting = cell.submit(prompt(3, kind=1), max_tokens=1)
    for kind in range(5, 9):
        cell.submit(prompt(3, kind=kind), max_tokens=1, priority=5)
    assert held(cell)[waiting]

    cell.drain()

    last = cell.admitted[-1]
    assert (last.request_id, last.host_tokens) == (waiting, 3 * CHUNK)
    assert held(cell) == {}
