"""What storages say of fetches, and how fetches end."""

from typing import Any

import pytest

from services.scheduler.core.step import Output
from shared.messages.cell_events import FlushCache
from shared.messages.storage_events import ChunksDropped, ChunksFetched
from shared.messages.storage_plans import CancelFetch, DropChunks, FetchChunks
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell, host_pool, orders, orders_of
from tests.unit.scheduler.core.fetching import CHUNK, PAGE, host_tokens, prompt, put_on_disk


@pytest.fixture
def cell(make_cell: MakeCell) -> CellModel:
    """A cell whose requests wait for their fetches, and that writes nothing to disk."""
    return make_cell(page_size=PAGE, pages=64, host_pages=40, disk_chunks=100, prefetch_wait="full", disk_writes="off")


def say(cell: CellModel, fetch_id: int = 1, chunks: int = 0, is_over: bool = False, **fields: Any) -> list[Output]:
    """The storage reports on a fetch."""
    incarnation = cell.storages["storage"].incarnation
    message = ChunksFetched(
        storage_id="storage", incarnation=incarnation, fetch_id=fetch_id, chunks=chunks, is_over=is_over, **fields
    )
    return cell.feed(message)


def test_each_report_makes_what_has_arrived_a_host_copy(cell: CellModel) -> None:
    """The nodes are there before the fetch is over, known to the policy and the hotness filter."""
    put_on_disk(cell, prompt(3))
    cell.submit(prompt(3))

    held = []
    for chunks in (1, 1, 3):
        say(cell, chunks=chunks)
        held.append(host_tokens(cell, prompt(3)))

    assert held == [CHUNK, CHUNK, 3 * CHUNK]
    assert cell.state.storages["storage"].fetching.pages == 0


def test_reports_never_go_back_and_name_no_more_than_was_asked_for(cell: CellModel) -> None:
    """A report that is late, negative or too large is taken for what it can mean."""
    put_on_disk(cell, prompt(2))
    cell.submit(prompt(2))

    say(cell, chunks=1)
    say(cell, chunks=0)
    say(cell, chunks=-5)
    say(cell, chunks=9, is_over=True)

    assert host_tokens(cell, prompt(2)) == 2 * CHUNK
    assert cell.state.fetches == {}
    assert cell.state.counters["malformed_inputs"] == 2


def test_a_report_on_a_fetch_that_is_over_is_stale(cell: CellModel) -> None:
    """It is counted, and what it says of the disk is still believed."""
    (first, _) = put_on_disk(cell, prompt(2))
    before = cell.state.counters.get("stale_inputs", 0)

    say(cell, fetch_id=77, chunks=1, missing=first)

    assert cell.state.counters["stale_inputs"] == before + 1
    assert first not in cell.state.storages["storage"].disk.chunks


def test_a_fetch_that_ends_early_leaves_the_rest_to_be_computed(cell: CellModel) -> None:
    """The chunk that failed leaves the catalogue, its pages are free, and the request runs."""
    names = put_on_disk(cell, prompt(3))
    cell.submit(prompt(3))

    say(cell, chunks=1, is_over=True, missing=names[1], error="checksum")

    assert cell.admitted[-1].disk_tokens == CHUNK
    assert list(cell.state.storages["storage"].disk.chunks) == [names[0], names[2]]
    assert host_pool(cell).leased == 0
    assert cell.state.counters["fetches_failed"] == 1


def test_a_chunk_that_rots_on_disk_costs_a_recomputation_only(cell: CellModel) -> None:
    """The answer is right, and the chunk is not asked for again."""
    names = put_on_disk(cell, prompt(3))
    cell.disks["storage"].chunks[names[1]][0].is_corrupt = True

    cell.serve(prompt(3))

    assert names[1] not in cell.state.storages["storage"].disk.chunks


def test_tokens_from_disk_and_store_are_told_apart(cell: CellModel) -> None:
    """The storage says how many chunks came from where."""
    put_on_disk(cell, prompt(3))
    cell.submit(prompt(3))

    say(cell, chunks=3, is_over=True, disk_chunks=1, remote_chunks=2)

    admitted = cell.admitted[-1]
    assert (admitted.disk_tokens, admitted.remote_tokens, admitted.host_tokens) == (CHUNK, 2 * CHUNK, 0)
    assert cell.state.counters["fetched_tokens_remote"] == 2 * CHUNK


def test_a_storage_that_is_lost_takes_its_fetches_along(cell: CellModel) -> None:
    """Who waited recomputes."""
    put_on_disk(cell, prompt(3))
    cell.submit(prompt(3))

    cell.lose_storage("storage")

    assert cell.state.fetches == {}
    assert cell.admitted[-1].cached_tokens == 0
    cell.drain()


def test_a_storage_that_comes_back_lists_its_disk_again(cell: CellModel) -> None:
    """The disk outlives the process, and the next request has it fetched."""
    put_on_disk(cell, prompt(3))
    cell.lose_storage("storage")
    cell.add_storage("storage", pages=40, disk_chunks=100)
    cell.drain()

    cell.serve(prompt(3))

    assert cell.admitted[-1].disk_tokens == 3 * CHUNK


def test_a_request_whose_worker_is_lost_goes_on_with_its_fetch_elsewhere(cell: CellModel) -> None:
    """The next worker of the node is served by the same storage."""
    put_on_disk(cell, prompt(3))
    cell.add_worker("worker-1", pages=64)
    cell.drain()
    name = cell.submit(prompt(3))
    first = cell.state.requests[name].worker_id

    cell.lose_worker(first)
    assert orders(cell.outputs[-1], CancelFetch) == []
    cell.drain()

    assert cell.state.counters["fetches_started"] == 1
    assert cell.admitted[-1].disk_tokens == 3 * CHUNK


def test_copies_that_came_meanwhile_keep_their_pages(cell: CellModel) -> None:
    """What a backup made resident first stays, and the fetch's pages for it are free again."""
    cell.serve(prompt(1), max_tokens=1)
    put_on_disk(cell, prompt(3))
    cell.feed(FlushCache(call_id="call", tiers=("device",)))
    cell.submit(prompt(3))
    cell.serve([*prompt(2, kind=1), 9], read=False, max_tokens=1)

    assert host_pool(cell).leased == 0


def test_a_fetch_on_top_of_what_was_evicted_meanwhile_comes_to_nothing(cell: CellModel) -> None:
    """Nothing can hang under tokens that are resident nowhere: pages are given back, and all is fetched once more."""
    cell.serve(prompt(1), max_tokens=1)
    put_on_disk(cell, prompt(3))
    cell.submit(prompt(3))
    cell.feed(FlushCache(call_id="call", tiers=("device", "host")))

    say(cell, chunks=2, is_over=True)

    assert host_tokens(cell, prompt(3)) == 0
    (fetch,) = cell.state.fetches.values()
    assert (fetch.depth, len(fetch.names) // 16) == (0, 3)
    assert host_pool(cell).free == 40 - 6
    say(cell, fetch_id=fetch.fetch_id, chunks=0, is_over=True)
    assert host_pool(cell).free == 40
    assert cell.admitted[-1].cached_tokens == 0


def test_what_went_before_its_fetch_was_over_is_fetched_again(make_cell: MakeCell) -> None:
    """Also where nothing of the prompt was there when it was queued."""
    cell = make_cell(page_size=PAGE, pages=64, host_pages=40, disk_chunks=100, disk_writes="off", max_running=1)
    put_on_disk(cell, prompt(3))
    cell.submit(prompt(1, kind=9), max_tokens=1)
    cell.submit(prompt(3), max_tokens=1)
    say(cell, chunks=2)
    cell.feed(FlushCache(call_id="call", tiers=("host",)))

    say(cell, chunks=3, is_over=True)
    assert host_tokens(cell, prompt(3)) == 0
    cell.storages["storage"].fetches.clear()
    cell.drain()

    assert cell.admitted[-1].disk_tokens == 3 * CHUNK


def test_a_node_that_runs_through_the_fetched_span_is_cut_at_its_ends(cell: CellModel) -> None:
    """It gets a copy of just what was fetched."""
    cell.serve(prompt(4), max_tokens=1)
    worker = cell.state.workers["worker-0"]
    put_on_disk(cell, prompt(2))
    cell.add_worker("worker-1", pages=100, node="elsewhere")
    cell.lose_storage("storage")
    cell.add_storage("storage", pages=40, node="elsewhere", disk_chunks=100)
    cell.drain()

    cell.serve(prompt(2), max_tokens=2500)  # Only the larger pool has room for such an answer.

    assert worker.pool.cached == 8
    assert host_tokens(cell, prompt(4)) == 2 * CHUNK


def test_flushing_lower_tiers_orders_the_storages_to_delete(cell: CellModel) -> None:
    """Fetches of them are cut off; the catalogue follows the storage's word."""
    names = put_on_disk(cell, prompt(3))
    cell.submit(prompt(3))

    outputs = cell.feed(FlushCache(call_id="call", tiers=("disk", "remote", "host")))
    assert orders(outputs, DropChunks) == [DropChunks(namespace="", tiers=("disk", "remote"))]
    assert len(orders(outputs, CancelFetch)) == 1
    incarnation = cell.storages["storage"].incarnation
    cell.feed(ChunksDropped(storage_id="storage", incarnation=incarnation, chunks=b"".join(names)))

    assert cell.state.storages["storage"].disk.chunks == {}


def test_a_storage_without_lower_tiers_is_never_asked(make_cell: MakeCell) -> None:
    """Neither for a fetch nor to delete."""
    cell = make_cell(page_size=PAGE, host_pages=40)

    cell.submit(prompt(3))
    cell.feed(FlushCache(call_id="call", tiers=("disk", "remote")))
    cell.drain()

    sent = orders_of(cell, (FetchChunks, DropChunks))
    assert sent == []


def test_the_speed_of_the_disk_is_learnt_from_its_fetches(cell: CellModel) -> None:
    """Bytes and seconds of fetches that are over, object stores aside."""
    put_on_disk(cell, prompt(2))
    assert cell.state.geometry is not None
    page_bytes = cell.state.geometry.page_bytes
    cell.submit(prompt(2))

    say(cell, chunks=2, is_over=True, disk_chunks=2, nbytes=4 * page_bytes, seconds=0.5)

    storage = cell.state.storages["storage"]
    assert (storage.fetching.tokens, storage.fetching.us) == (2 * CHUNK, 500_000)
