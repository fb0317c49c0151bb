"""Fetches of hidden states: whose pages they fill, how they end, and that every page comes back once."""

from collections.abc import Callable
from typing import Any

import pytest

from services.scheduler.core.step import Output
from shared.messages.cell_events import FlushCache
from shared.messages.storage_events import ChunksFetched
from shared.messages.storage_plans import CancelFetch, FetchChunks
from tests.present import present
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders, orders_of, timer_of, worker_goes_on
from tests.unit.scheduler.core.fetching import CHUNK, PAGE, prompt, put_on_disk
from tests.unit.scheduler.core.restoring_cells import bring, hidden_pool, put_hidden, restores, storage_obeys

EACH = CHUNK // PAGE


@pytest.fixture
def fetching(make_restoring_cell: MakeCell) -> Callable[..., tuple[CellModel, str]]:
    """A cell in which a request waits for three chunks of its hidden states, ``chunks`` of which have arrived."""

    def make(chunks: int = 0, **settings: Any) -> tuple[CellModel, str]:
        cell = make_restoring_cell(**settings)
        put_hidden(cell, prompt(3))
        name = cell.submit(prompt(3))
        bring(cell, chunks)
        return cell, name

    return make


def say(cell: CellModel, **fields: Any) -> list[Output]:
    """A ChunksFetched of the only fetch of hidden states there is."""
    (fetch_id,) = cell.state.hidden_fetches
    who: dict[str, Any] = {"storage_id": "storage", "incarnation": cell.storages["storage"].incarnation}
    return cell.feed(ChunksFetched(**who, fetch_id=fetch_id, **fields))


def test_a_cancelled_request_gives_its_pages_back_when_the_storage_is_done(
    fetching: Callable[..., tuple[CellModel, str]],
) -> None:
    """Until then the storage may write to them."""
    cell, name = fetching()

    cell.cancel(name)

    assert len(orders(cell.outputs[-1], CancelFetch)) == 1
    assert hidden_pool(cell).leased == 3 * EACH
    say(cell, chunks=0, is_over=True)
    assert hidden_pool(cell).leased == 0
    assert cell.state.counters["hidden_fetches_cancelled"] == 1


def test_what_has_arrived_for_a_request_that_is_gone_is_free_at_once(
    fetching: Callable[..., tuple[CellModel, str]],
) -> None:
    """Nothing writes to those pages any more, and nobody reads them."""
    cell, name = fetching(1)

    cell.cancel(name)
    cell.drain()

    assert hidden_pool(cell).leased == 0
    assert cell.state.hidden_fetches == {}


def test_past_its_deadline_a_fetch_leaves_what_has_arrived(fetching: Callable[..., tuple[CellModel, str]]) -> None:
    """One chunk is restored, the others are computed; their pages wait for the storage, which is asked for no more."""
    cell, name = fetching(1)
    cell.fire(timer_of(cell, "fetch."))

    request, storage = cell.state.requests[name], cell.state.storages["storage"]
    assert request.hidden.run is not None
    assert (request.hidden.run.end, request.hidden.run.fetch, request.hidden.refusals) == (CHUNK, 0, 1)
    assert storage.fetching.late == 1
    assert len(orders(cell.outputs[-1], CancelFetch)) == 1
    cell.submit(prompt(3, kind=2))
    assert len(cell.state.hidden_fetches) == 1
    cell.drain()
    assert cell.workers["worker-0"].restored_tokens == CHUNK
    assert (storage.fetching.late, hidden_pool(cell).leased) == (0, 0)


def test_past_its_deadline_a_request_that_has_nothing_computes(fetching: Callable[..., tuple[CellModel, str]]) -> None:
    """It does not wait for the storage's answer."""
    cell, name = fetching()
    cell.fire(timer_of(cell, "fetch."))

    assert [order.request_id for order in cell.admitted] == [name]
    assert cell.state.requests[name].hidden.run is None
    cell.drain()
    assert restores(cell) == []


def test_a_chunk_that_is_missing_is_forgotten_and_fetched_as_kv(make_restoring_cell: MakeCell) -> None:
    """Hidden states that are gone leave the catalogue; the other form of the same chunks is asked for next."""
    cell = make_restoring_cell()
    names = put_hidden(cell, prompt(3))
    put_on_disk(cell, prompt(3))
    cell.submit(prompt(3))
    storage_obeys(cell)
    cell.hidden_disks["storage"].chunks.clear()

    cell.drain()

    storage = cell.state.storages["storage"]
    assert names[0] not in storage.hidden.chunks
    assert names[1] in storage.hidden.chunks
    assert cell.admitted[-1].disk_tokens == 3 * CHUNK


def test_a_fetch_that_ends_early_leaves_a_part(fetching: Callable[..., tuple[CellModel, str]]) -> None:
    """The second chunk cannot be read: the first is restored, the pages of the others are free."""
    cell, name = fetching(1)

    say(cell, chunks=1, is_over=True, error="made to fail")

    assert hidden_pool(cell).leased == EACH
    assert present(cell.state.requests[name].hidden.run).end == CHUNK
    cell.workers["worker-0"].step()
    cell.storages["storage"].fetches.clear()
    cell.drain()
    assert cell.workers["worker-0"].restored_tokens == CHUNK
    assert cell.state.counters["hidden_fetches_failed"] == 1


def test_a_lost_storage_takes_its_runs_along(fetching: Callable[..., tuple[CellModel, str]]) -> None:
    """Who waited computes, who is admitted goes on computing where restoring has come to."""
    cell, name = fetching(1)
    worker_goes_on(cell)
    other = cell.submit(prompt(3, kind=2))
    assert cell.state.requests[other].hidden.run is None  # Nothing is known of its hidden states.

    cell.lose_storage("storage")

    assert cell.state.requests[name].hidden.run is None
    assert cell.state.hidden_fetches == {}
    cell.drain()
    assert cell.workers["worker-0"].restored_tokens == CHUNK


def test_a_lost_storage_frees_who_waits_for_it(fetching: Callable[..., tuple[CellModel, str]]) -> None:
    """No part of the hidden states has come; the request is admitted in the same step."""
    cell, name = fetching()

    cell.lose_storage("storage")

    assert [order.request_id for order in cell.admitted] == [name]
    cell.drain()


def test_a_lost_worker_gives_the_run_up(fetching: Callable[..., tuple[CellModel, str]]) -> None:
    """Its request begins anew elsewhere, and the pages come back when the fetch is over."""
    cell, name = fetching(1)
    assert cell.admitted

    cell.lose_worker("worker-0")
    assert cell.state.requests[name].hidden.run is None
    cell.add_worker("worker-1", pages=64)
    cell.drain()

    assert hidden_pool(cell).leased == 0


def test_a_flush_of_the_disk_calls_off_what_waits_for_it(fetching: Callable[..., tuple[CellModel, str]]) -> None:
    """Hidden states that are to be forgotten are not restored from, unless they had arrived for who was admitted."""
    cell, name = fetching()

    cell.feed(FlushCache(call_id="call", tiers=("disk",)))

    assert cell.state.requests[name].hidden.run is None
    assert [order.request_id for order in cell.admitted] == [name]
    cell.drain()


def test_a_flush_of_another_namespace_changes_nothing(fetching: Callable[..., tuple[CellModel, str]]) -> None:
    """Only what it names is forgotten."""
    cell, name = fetching()

    cell.feed(FlushCache(call_id="call", tiers=("disk",), namespace="ab" * 16))

    assert cell.state.requests[name].hidden.run is not None
    cell.drain()


def test_one_request_takes_half_of_the_pool_and_goes_on_as_pages_come_back(make_restoring_cell: MakeCell) -> None:
    """Of six chunks two are ordered, and the others as the worker has restored those before: none is computed."""
    cell = make_restoring_cell(hidden_pages=4 * EACH)
    put_hidden(cell, prompt(6))
    name = cell.submit(prompt(6))
    run = cell.state.requests[name].hidden.run
    assert run is not None
    assert (run.end, run.goal) == (2 * CHUNK, 6 * CHUNK)

    cell.drain()

    assert cell.workers["worker-0"].restored_tokens == 6 * CHUNK
    assert cell.state.counters["hidden_runs_extended"] > 0
    assert hidden_pool(cell).leased == 0


def test_who_finds_no_room_is_looked_at_again_when_it_is_next(make_restoring_cell: MakeCell) -> None:
    """The pool has room for two requests' hidden states at a time; the third gets its own as the first gives pages
    back.
    """
    cell = make_restoring_cell(hidden_pages=4 * EACH, max_running=1)
    for kind in (1, 2, 3):
        put_hidden(cell, prompt(2, kind=kind))

    cell.submit([9] * 10, max_tokens=20)
    names = [cell.submit(prompt(2, kind=kind)) for kind in (1, 2, 3)]
    assert [cell.state.requests[name].hidden.run is not None for name in names] == [True, True, False]
    cell.drain()

    assert cell.workers["worker-0"].restored_tokens == 3 * 2 * CHUNK


def test_without_room_for_hidden_states_kv_is_fetched(make_restoring_cell: MakeCell) -> None:
    """A pool of one chunk lends none of it, for half of that is less than a chunk."""
    cell = make_restoring_cell(hidden_pages=EACH)
    put_hidden(cell, prompt(3))
    put_on_disk(cell, prompt(3))

    name = cell.submit(prompt(3))

    assert cell.state.counters["hidden_runs_without_room"] == 1
    assert (cell.state.requests[name].hidden.run, cell.state.requests[name].prefetch.fetch) == (None, 1)
    cell.drain()


def test_who_shares_the_prefix_waits_for_the_first_and_then_for_what_it_restores(make_restoring_cell: MakeCell) -> None:
    """One fetch is for all of them: the others are deferred until the first has it on the device."""
    cell = make_restoring_cell(max_running=4)
    put_hidden(cell, prompt(3))
    cell.submit(prompt(3))
    others = [cell.submit(prompt(3, tail=tail)) for tail in (4, 5)]

    fetched = orders_of(cell, FetchChunks)
    assert len(fetched) == 1
    assert all(cell.state.requests[name].wait.fetch for name in others)
    cell.drain()

    assert cell.workers["worker-0"].restored_tokens == 3 * CHUNK
    assert [order.device_tokens for order in cell.admitted] == [0, 3 * CHUNK, 3 * CHUNK]


def test_who_shares_a_prefix_whose_first_request_is_cancelled_fetches_itself(make_restoring_cell: MakeCell) -> None:
    """The second takes over, with a fetch of its own."""
    cell = make_restoring_cell(max_running=4)
    put_hidden(cell, prompt(3))
    first = cell.submit(prompt(3))
    second = cell.submit(prompt(3, tail=4))

    cell.cancel(first)

    assert cell.state.requests[second].hidden.run is not None
    cell.drain()
    assert hidden_pool(cell).leased == 0


def test_the_disk_is_measured_with_what_was_queued_before(fetching: Callable[..., tuple[CellModel, str]]) -> None:
    """Two fetches of as many bytes that run at once take twice as long; the disk is as fast as it was."""
    cell, _ = fetching()
    put_hidden(cell, prompt(3, kind=2))
    cell.submit(prompt(3, kind=2))
    storage = cell.state.storages["storage"]
    first, second = cell.state.hidden_fetches.values()
    nbytes = 3 * CHUNK * 4  # One layer, one value of four bytes.
    assert (first.queued_bytes, second.queued_bytes) == (0, nbytes)

    who: dict[str, Any] = {"storage_id": "storage", "incarnation": storage.incarnation, "is_over": True, "chunks": 3}
    cell.feed(ChunksFetched(**who, fetch_id=second.fetch_id, nbytes=nbytes, seconds=2e-3))

    assert storage.fetching.disk_rate.amount / storage.fetching.disk_rate.elapsed_us == pytest.approx(nbytes / 1e3)
    assert storage.fetching.disk_rate.observations == 1


def test_a_repeated_end_of_a_fetch_is_stale(fetching: Callable[..., tuple[CellModel, str]]) -> None:
    """It is counted, and gives nothing back twice."""
    cell, _ = fetching()
    bring(cell, 4)
    before = cell.state.counters.get("stale_inputs", 0)
    ended = next(item.input for item in reversed(cell.log) if isinstance(item.input, ChunksFetched))

    cell.feed(ended)

    assert cell.state.counters["stale_inputs"] == before + 1
    cell.drain()
