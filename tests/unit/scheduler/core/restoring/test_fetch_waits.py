"""How long a request waits for what is fetched for it."""

from typing import Any

import pytest

from shared.messages.storage_plans import CancelFetch, FetchChunks
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders, timer_of, worker_goes_on
from tests.unit.scheduler.core.fetching import CHUNK, PAGE, prompt, put_on_disk


@pytest.fixture
def cell_that(make_cell: MakeCell) -> MakeCell:
    """A cell with a disk, and one way of waiting."""

    def make(wait: str, **config: Any) -> CellModel:
        shape = {"page_size": PAGE, "pages": 64, "host_pages": 40, "disk_chunks": 100}
        return make_cell(**shape, prefetch_wait=wait, max_batch_tokens=1000, **config)

    return make


def bring(cell: CellModel, chunks: int) -> None:
    """The storage brings so many chunks, and says so."""
    storage = cell.storages["storage"]
    while storage.step():
        pass
    for _ in range(chunks):
        storage.fetch()
        cell.deliver(storage)


def test_best_effort_admits_at_once_and_cuts_its_fetch_off(cell_that: MakeCell) -> None:
    """A worker that is free takes the request with what has arrived by then: nothing."""
    cell = cell_that("best_effort")
    put_on_disk(cell, prompt(3))

    cell.submit(prompt(3))

    assert len(orders(cell.outputs[-1], CancelFetch)) == 1
    assert cell.admitted[-1].cached_tokens == 0


def test_best_effort_uses_what_arrived_while_the_worker_was_busy(cell_that: MakeCell) -> None:
    """A place becomes free when two of three chunks are there; the third is computed."""
    cell = cell_that("best_effort", max_running=1)
    put_on_disk(cell, prompt(3))
    cell.submit(prompt(1, kind=5))
    name = cell.submit(prompt(3))
    bring(cell, 2)

    while len(cell.admitted) < 2:
        worker_goes_on(cell)

    admitted = cell.admitted[-1]
    assert (admitted.request_id, admitted.disk_tokens, admitted.host_tokens) == (name, 2 * CHUNK, 0)
    cell.drain()


@pytest.mark.parametrize("wait", ["deadline", "full"])
def test_a_request_waits_for_its_fetch(cell_that: MakeCell, wait: str) -> None:
    """It is out of the order until the fetch is over, and then loads all of it."""
    cell = cell_that(wait)
    put_on_disk(cell, prompt(3))
    name = cell.submit(prompt(3))

    bring(cell, 2)
    assert cell.state.requests[name].wait.fetch
    assert cell.admitted == []
    bring(cell, 1)

    assert cell.admitted[-1].disk_tokens == 3 * CHUNK
    assert cell.state.counters["prefetch_wait_ms"] > 0
    cell.drain()


def test_past_the_deadline_a_request_runs_with_what_has_arrived(cell_that: MakeCell) -> None:
    """The rest of its fetch is cut off, and the one chunk that came is loaded."""
    cell = cell_that("deadline", prefetch_deadline_ms=50)
    put_on_disk(cell, prompt(3))
    cell.submit(prompt(3))
    bring(cell, 1)
    timer = timer_of(cell, "prefetch.")
    assert cell.timers[timer] <= cell.time_ns + 50_000_000

    cell.fire(timer)

    assert cell.admitted[-1].disk_tokens == CHUNK
    assert len(orders(cell.outputs[-1], CancelFetch)) == 1
    assert cell.state.counters["prefetch_deadlines"] == 1


def test_nobody_waits_longer_than_computing_takes(cell_that: MakeCell) -> None:
    """Where the worker's speed is known, it bounds the wait."""
    cell = cell_that("deadline", prefetch_deadline_ms=60_000)
    speed = cell.state.speed
    speed.reports, speed.flat = 5, 100.0
    put_on_disk(cell, prompt(3))

    cell.submit(prompt(3))

    timer = timer_of(cell, "prefetch.")
    assert cell.timers[timer] - cell.time_ns == pytest.approx(3 * CHUNK * 100_000, abs=1e6)


def test_a_full_wait_ends_with_the_deadline_of_the_fetch(cell_that: MakeCell) -> None:
    """The fetch is cut off, the request recomputes, and what the storage may write to stays leased."""
    cell = cell_that("full", fetch_deadline_ms=700)
    put_on_disk(cell, prompt(3))
    cell.submit(prompt(3))
    assert not any(name.startswith("prefetch.") for name in cell.timers)

    cell.fire("fetch.1")

    assert len(orders(cell.outputs[-1], CancelFetch)) == 1
    assert cell.admitted[-1].cached_tokens == 0
    assert cell.state.storages["storage"].fetching.pages == 6
    cell.drain()
    assert cell.state.storages["storage"].fetching.pages == 0


def test_a_storage_that_let_a_deadline_pass_is_asked_for_nothing_more(cell_that: MakeCell) -> None:
    """Nobody waits for a disk that hangs, until it answers."""
    cell = cell_that("full")
    put_on_disk(cell, prompt(3))
    put_on_disk(cell, prompt(3, kind=5))
    cell.submit(prompt(3))
    cell.fire("fetch.1")

    cell.submit(prompt(3, kind=5))
    assert orders(cell.outputs[-1], FetchChunks) == []
    assert cell.admitted[-1].cached_tokens == 0
    cell.drain()

    put_on_disk(cell, prompt(2, kind=6))
    cell.submit(prompt(2, kind=6))
    assert len(orders(cell.outputs[-1], FetchChunks)) == 1


def test_one_that_waits_for_a_fetch_lets_others_pass(cell_that: MakeCell) -> None:
    """A request that needs nothing from below runs meanwhile."""
    cell = cell_that("full")
    put_on_disk(cell, prompt(3))
    cell.submit(prompt(3))

    other = cell.submit(prompt(1, kind=5))

    assert [order.request_id for order in cell.admitted] == [other]


def test_one_that_waits_for_a_fetch_announces_nothing(cell_that: MakeCell) -> None:
    """Nobody is deferred for KV that it is not going to compute."""
    cell = cell_that("full", defer_tokens=10)
    put_on_disk(cell, prompt(3))
    first = cell.submit(prompt(3))

    second = cell.submit(prompt(3) + [9] * 5)

    assert not cell.state.requests[first].place.marks
    assert cell.state.requests[second].wait.fetch == cell.state.requests[first].wait.fetch
    cell.drain()


def test_one_that_waits_for_a_producer_has_fetched_what_that_does_not_bring(
    cell_that: MakeCell,
) -> None:
    """What the producer computes is not fetched as well; what lies behind it is, as soon as it can stand on it."""
    cell = cell_that("full", defer_tokens=10)
    cell.submit(prompt(2))
    put_on_disk(cell, prompt(4))

    name = cell.submit(prompt(4))
    assert cell.state.requests[name].wait.producer
    assert cell.state.fetches == {}
    cell.drain()

    admitted = cell.admitted[-1]
    assert (admitted.device_tokens, admitted.disk_tokens) == (2 * CHUNK, 2 * CHUNK)


def test_a_fetch_that_others_brought_first_is_let_go_of(cell_that: MakeCell) -> None:
    """Once the device has the tokens there is nothing to wait for."""
    cell = cell_that("full", defer_tokens=0, max_running=1)
    cell.submit(prompt(2), max_tokens=1)
    put_on_disk(cell, prompt(2))
    cell.submit([*prompt(2), 5], max_tokens=1)

    while len(cell.admitted) < 2:
        worker_goes_on(cell)

    assert cell.admitted[-1].device_tokens == 2 * CHUNK
    cell.drain()
    assert cell.state.counters["fetches_cancelled"] == 1
