"""What is fetched for a waiting request, and how that is bounded."""

import pytest

from services.scheduler.core.restoring.prefetch import NEAR
from shared.messages.base import unpack_int32
from shared.messages.storage_plans import CancelFetch, FetchChunks
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders, orders_of
from tests.unit.scheduler.core.fetching import (
    CHUNK,
    PAGE,
    chunks_of,
    host_tokens,
    list_chunks,
    prompt,
    put_in_store,
    put_on_disk,
)


@pytest.fixture
def cell(make_cell: MakeCell) -> CellModel:
    """A cell whose disk has room for a hundred chunks."""
    return make_cell(page_size=PAGE, pages=64, host_pages=40, disk_chunks=100, disk_writes="off")


def test_a_prompt_that_goes_on_on_disk_is_fetched_when_it_is_queued(cell: CellModel) -> None:
    """The order names every page of the whole chunks that the disk holds, and a leased host page for each."""
    names = put_on_disk(cell, prompt(3))

    cell.submit(prompt(3))

    (order,) = orders(cell.outputs[-1], FetchChunks)
    assert (order.depth, len(order.host_pages) // 4) == (0, 6)
    assert [order.identities[index * 16 : index * 16 + 16] for index in (1, 3, 5)] == names
    assert cell.state.storages["storage"].fetching.pages == 6


def test_nothing_is_fetched_of_what_the_disk_does_not_continue(cell: CellModel) -> None:
    """A run ends at the first chunk that is not in the catalogue, whatever lies behind it."""
    names = list(chunks_of(prompt(4)))
    list_chunks(cell, [names[0], names[1], names[3]])

    cell.submit(prompt(4))

    (order,) = orders(cell.outputs[-1], FetchChunks)
    assert len(order.host_pages) // 4 == 4


def test_a_request_that_may_not_read_the_cache_has_nothing_fetched(cell: CellModel) -> None:
    """Neither one that says so nor one that needs every token computed."""
    put_on_disk(cell, prompt(3))

    cell.submit(prompt(3), read=False)
    cell.submit(prompt(3), prompt_logprobs=1)

    assert orders_of(cell, FetchChunks) == []


def test_the_last_token_is_computed_even_if_its_chunk_is_on_disk(cell: CellModel) -> None:
    """Of a prompt that ends with a chunk, that chunk is of no use."""
    put_on_disk(cell, prompt(3))

    cell.submit(prompt(3, tail=0))

    (order,) = orders(cell.outputs[-1], FetchChunks)
    assert len(order.host_pages) // 4 == 4


def test_a_run_goes_on_from_what_the_device_has_in_the_middle_of_a_chunk(cell: CellModel) -> None:
    """Pages that are resident already go nowhere."""
    cell.serve(prompt(3)[: CHUNK + PAGE + 1], max_tokens=1)
    put_on_disk(cell, prompt(3))

    cell.submit(prompt(3))

    (order,) = orders(cell.outputs[-1], FetchChunks)
    assert order.depth == CHUNK
    assert [page >= 0 for page in unpack_int32(order.host_pages)] == [False, True, True, True]


def test_a_run_shorter_than_the_bound_is_recomputed(make_cell: MakeCell) -> None:
    """``min_prefetch_tokens`` says what is worth a fetch."""
    cell = make_cell(page_size=PAGE, host_pages=40, disk_chunks=100, min_prefetch_tokens=2 * CHUNK + 1)
    put_on_disk(cell, prompt(2))
    put_on_disk(cell, prompt(3, kind=5))

    cell.submit(prompt(2))
    assert orders_of(cell, FetchChunks) == []

    cell.submit(prompt(3, kind=5))
    assert len(orders_of(cell, FetchChunks)) == 1


def test_fetches_under_way_take_no_more_than_their_part_of_the_pool(make_cell: MakeCell) -> None:
    """What has no room is fetched when the first part is there."""
    cell = make_cell(page_size=PAGE, pages=64, host_pages=16, disk_chunks=100, prefetch_fraction=0.25)
    put_on_disk(cell, prompt(3))

    cell.submit(prompt(3))
    assert cell.state.storages["storage"].fetching.pages == 4
    cell.drain()

    sizes = [len(order.host_pages) // 4 for order in orders_of(cell, FetchChunks)]
    assert sizes == [4, 2]
    assert cell.admitted[-1].disk_tokens == 3 * CHUNK


def test_two_requests_share_the_fetch_of_what_they_share(cell: CellModel) -> None:
    """The shorter one goes on as soon as its part is there, and the other finds that on the device."""
    put_on_disk(cell, prompt(3))

    cell.submit(prompt(3))
    cell.serve(prompt(2) + [9] * 70)

    assert len(orders_of(cell, FetchChunks)) == 1
    found = [(order.device_tokens, order.disk_tokens) for order in cell.admitted]
    assert found == [(0, 2 * CHUNK), (2 * CHUNK, CHUNK)]


def test_room_is_not_made_at_the_price_of_what_the_run_goes_on_from(make_cell: MakeCell) -> None:
    """The copies above a run are evicted last though they are the coldest."""
    cell = make_cell(page_size=PAGE, pages=16, host_pages=6, disk_chunks=100, policy="lru", disk_writes="off")
    put_on_disk(cell, prompt(3))
    cell.serve(prompt(1), max_tokens=1)
    cell.serve(prompt(2, kind=5), max_tokens=1)
    for _ in range(3):
        cell.serve([3] * (15 * PAGE), max_tokens=1, write=False)
    before = host_tokens(cell, prompt(1))

    cell.submit(prompt(2))
    held = host_tokens(cell, prompt(1))
    cell.drain()

    assert before == held == CHUNK


def test_an_object_store_is_asked_for_a_few_chunks_and_then_for_the_rest(make_cell: MakeCell) -> None:
    """Nothing is known of it beforehand; once what was asked for came, all that one fetch may bring is."""
    cell = make_cell(page_size=PAGE, pages=128, host_pages=128, has_remote=True)
    put_in_store(cell, prompt(20))

    cell.serve(prompt(20))

    assert [len(order.host_pages) // 4 for order in orders_of(cell, FetchChunks)] == [32, 8]
    assert (cell.admitted[-1].remote_tokens, cell.admitted[-1].disk_tokens) == (20 * CHUNK, 0)
    assert cell.state.counters["hit_tokens_remote"] == 20 * CHUNK


def test_an_object_store_that_has_nothing_costs_one_question(make_cell: MakeCell) -> None:
    """The request goes on as soon as it is known, and the host pages are free again."""
    cell = make_cell(page_size=PAGE, pages=64, host_pages=40, has_remote=True)

    cell.serve(prompt(3))

    assert len(orders_of(cell, FetchChunks)) == 1
    assert cell.admitted[-1].cached_tokens == 0
    assert cell.state.counters["fetches_short"] == 1
    assert "fetches_failed" not in cell.state.counters


def test_a_request_that_ends_lets_go_of_its_fetch(cell: CellModel) -> None:
    """What nobody wants is cut off; what had arrived stays."""
    put_on_disk(cell, prompt(3))
    name = cell.submit(prompt(3))
    storage = cell.storages["storage"]
    storage.step()
    storage.fetch()
    cell.deliver(storage)

    cell.cancel(name)
    assert len(orders(cell.outputs[-1], CancelFetch)) == 1
    cell.drain()

    assert cell.state.counters["fetches_cancelled"] == 1
    assert host_tokens(cell, prompt(3)) == CHUNK


def test_a_new_worker_takes_nothing_from_a_fetch_that_goes_on(cell: CellModel) -> None:
    """Requests that are placed anew on the same node keep what is fetched for them."""
    put_on_disk(cell, prompt(3))
    cell.submit(prompt(3))

    cell.add_worker("worker-1", pages=64)
    cell.drain()

    assert len(orders_of(cell, FetchChunks)) == 1
    assert cell.admitted[-1].disk_tokens == 3 * CHUNK


def test_what_was_fetched_for_requests_that_still_wait_takes_room_too(make_cell: MakeCell) -> None:
    """Behind a long queue nothing is fetched that would be evicted again before its turn; order of arrival decides."""
    cell = make_cell(
        page_size=PAGE,
        pages=64,
        host_pages=16,
        disk_chunks=100,
        prefetch_fraction=0.4,
        max_running=1,
        disk_writes="off",
    )
    for kind in (1, 2, 3):
        put_on_disk(cell, prompt(3, kind=kind))
    cell.submit(prompt(1, kind=9))
    names = [cell.submit(prompt(3, kind=kind)) for kind in (1, 2, 3)]
    storage = cell.state.storages["storage"]
    while cell.storages["storage"].step() or cell.storages["storage"].fetch():
        cell.deliver(cell.storages["storage"])

    assert list(storage.fetching.ahead) == [names[0]]
    assert list(storage.fetching.due) == [names[1], names[2]]
    assert len(orders_of(cell, FetchChunks)) == 1

    cell.drain()
    assert (storage.fetching.ahead, storage.fetching.due) == ({}, {})
    assert [order.disk_tokens for order in cell.admitted[1:]] == [3 * CHUNK] * 3


def test_one_that_is_next_has_room_whatever_was_fetched_for_those_behind_it(make_cell: MakeCell) -> None:
    """They may have it fetched again; it would have to compute its prompt."""
    cell = make_cell(
        page_size=PAGE,
        pages=64,
        host_pages=16,
        disk_chunks=100,
        prefetch_fraction=0.4,
        max_running=1,
        disk_writes="off",
    )
    for kind in (1, 2):
        put_on_disk(cell, prompt(3, kind=kind))
    cell.submit(prompt(1, kind=9))
    behind = cell.submit(prompt(3, kind=1))
    while cell.storages["storage"].step() or cell.storages["storage"].fetch():
        cell.deliver(cell.storages["storage"])
    urgent = cell.submit(prompt(3, kind=2), priority=5)
    assert list(cell.state.storages["storage"].fetching.due) == [urgent]

    cell.drain()

    assert {order.request_id: order.disk_tokens for order in cell.admitted[1:]} == dict.fromkeys(
        [urgent, behind], 3 * CHUNK
    )


def test_one_who_waits_for_room_and_ends_leaves_its_place(make_cell: MakeCell) -> None:
    """Nothing is kept of it."""
    cell = make_cell(page_size=PAGE, pages=64, host_pages=16, disk_chunks=100, prefetch_fraction=0.4, max_running=1)
    for kind in (1, 2):
        put_on_disk(cell, prompt(3, kind=kind))
    cell.submit(prompt(1, kind=9))
    cell.submit(prompt(3, kind=1))
    name = cell.submit(prompt(3, kind=2))
    assert list(cell.state.storages["storage"].fetching.due) == [name]

    cell.cancel(name)

    assert cell.state.storages["storage"].fetching.due == {}


def test_nothing_is_fetched_for_the_end_of_a_long_queue(make_cell: MakeCell) -> None:
    """What is put off begins when the request is among the first in line."""
    cell = make_cell(page_size=PAGE, pages=64, host_pages=60, disk_chunks=100, max_running=1, disk_writes="off")
    put_on_disk(cell, prompt(3))
    for kind in range(2, 2 + NEAR + 3):
        cell.submit(prompt(1, kind=kind), max_tokens=1)

    name = cell.submit(prompt(3), max_tokens=1)
    assert cell.state.requests[name].prefetch.is_due
    assert orders_of(cell, FetchChunks) == []
    cell.drain()

    assert len(orders_of(cell, FetchChunks)) == 1
    assert cell.admitted[-1].disk_tokens == 3 * CHUNK
