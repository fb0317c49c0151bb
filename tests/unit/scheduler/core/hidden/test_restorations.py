"""A prefix that comes back from hidden states: fetched, admitted with its first part, restored as it arrives."""

from typing import Any

import pytest

from services.scheduler.core.queue.batch_builder import BatchBuilder
from services.scheduler.core.tiers.loads import note_loads
from services.scheduler.core.tiers.under_way import Chunk
from shared.messages.cell_events import FlushCache
from shared.messages.pools import HIDDEN
from shared.messages.storage_plans import FetchChunks
from shared.messages.worker_events import BatchDone
from shared.messages.worker_plans import RestoreChunk, RunBatch
from tests.stateful.model_hidden import COSTS
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders, orders_of, worker_goes_on
from tests.unit.scheduler.core.fetching import CHUNK, PAGE, prompt, put_on_disk
from tests.unit.scheduler.core.restoring_cells import (
    bring,
    bring_at_once,
    hidden_pool,
    put_hidden,
    restores,
    rot_hidden,
)


def test_hidden_states_are_fetched_into_leased_pages(make_restoring_cell: MakeCell) -> None:
    """The order is of the form, names the run's pages, and the tree has no part in it."""
    cell = make_restoring_cell()
    names = put_hidden(cell, prompt(3))

    name = cell.submit(prompt(3))

    (order,) = orders(cell.outputs[-1], FetchChunks)
    run = cell.state.requests[name].hidden.run
    assert run is not None
    assert (order.form, order.depth, order.host_pages, order.identities) == (HIDDEN, 0, run.pages, run.identities)
    assert (run.end, run.arrived, run.kind) == (3 * CHUNK, 0, "hidden from disk")
    assert run.identities[-16:] == names[-1]
    assert hidden_pool(cell).leased == len(run.pages) // 4 == 3 * CHUNK // PAGE
    assert not cell.state.tree.nodes


def test_a_request_is_admitted_with_its_first_part_and_restored_as_the_rest_arrives(
    make_restoring_cell: MakeCell,
) -> None:
    """Three chunks arrive one by one; each is restored before the next is there, and then the tail is computed."""
    cell = make_restoring_cell()
    put_hidden(cell, prompt(3))
    cell.submit(prompt(3))
    bring(cell, 0)
    assert cell.admitted == []

    spans = []
    for _ in range(3):
        bring(cell, 1)
        spans.append((restores(cell)[-1].start, restores(cell)[-1].end))
        worker_goes_on(cell)

    assert cell.admitted[0].cached_tokens == 0
    assert spans == [(0, CHUNK), (CHUNK, 2 * CHUNK), (2 * CHUNK, 3 * CHUNK)]
    assert cell.workers["worker-0"].restored_tokens == 3 * CHUNK
    cell.drain()
    assert cell.workers["worker-0"].prefilled_tokens == 3


def test_nothing_is_planned_while_the_next_part_is_on_its_way(make_restoring_cell: MakeCell) -> None:
    """What has arrived is planned; until more does the request has no chunk, and others are served."""
    cell = make_restoring_cell()
    put_hidden(cell, prompt(3))
    first = cell.submit(prompt(3))
    bring(cell, 1)
    worker_goes_on(cell)
    assert cell.state.requests[first].computed == CHUNK

    cell.submit(prompt(1, kind=9))

    (batch,) = orders(cell.outputs[-1], RunBatch)
    assert [chunk.request_id for chunk in batch.chunks] == ["request-2"]
    assert batch.restores == ()


def test_restored_kv_is_shared_like_computed_kv(make_restoring_cell: MakeCell) -> None:
    """It is in the tree as soon as the worker says so, and a second request finds it on the device."""
    cell = make_restoring_cell()
    put_hidden(cell, prompt(3))
    cell.serve(prompt(3))

    cell.submit(prompt(3, tail=5))

    assert cell.admitted[-1].device_tokens == 3 * CHUNK
    assert {order.request_id for order in restores(cell)} == {"request-1"}
    cell.drain()


def test_hidden_pages_come_back_part_by_part(make_restoring_cell: MakeCell) -> None:
    """With each chunk that the worker has restored its pages are free; with the last, the run is over."""
    cell = make_restoring_cell()
    put_hidden(cell, prompt(3))
    name = cell.submit(prompt(3))
    leased = [hidden_pool(cell).leased]
    for _ in range(2):
        bring(cell, 1)
        worker_goes_on(cell)
        leased.append(hidden_pool(cell).leased)
    bring(cell, 2)
    assert cell.state.requests[name].hidden.run is not None
    worker_goes_on(cell)

    each = CHUNK // PAGE
    assert leased == [3 * each, 2 * each, each]
    assert cell.state.requests[name].hidden.run is None
    assert hidden_pool(cell).leased == 0
    found = cell.state.predictions.by_kind["hidden from disk"]
    # The disk took 10 us a chunk and the worker 7 us: all of one, and a third of the other.
    assert found.observations == 1
    assert found.observed_us == pytest.approx(30 + 21 / 3)


def test_a_budget_bounds_what_a_batch_restores(make_restoring_cell: MakeCell) -> None:
    """A restored token counts as an eighth of a computed one here, in whole pages."""
    cell = make_restoring_cell(max_batch_tokens=20, batches_ahead=1)
    put_hidden(cell, prompt(3))
    cell.submit(prompt(3))
    bring_at_once(cell, 3)

    (order,) = restores(cell)

    assert order.end - order.start == 20 * 8 // PAGE * PAGE
    cell.drain()


def test_a_budget_below_a_page_restores_a_page(make_restoring_cell: MakeCell) -> None:
    """Whole pages are restored, so a batch takes one however small its budget is."""
    cell = make_restoring_cell(max_batch_tokens=1)
    put_hidden(cell, prompt(2))
    cell.serve(prompt(2))

    assert [order.end - order.start for order in restores(cell)] == [PAGE] * (2 * CHUNK // PAGE)


def test_the_last_token_is_always_computed(make_restoring_cell: MakeCell) -> None:
    """A prompt that is whole chunks keeps its last chunk to compute."""
    cell = make_restoring_cell()
    put_hidden(cell, prompt(3))

    cell.serve(prompt(3, tail=0))

    assert restores(cell)[-1].end == 2 * CHUNK


def test_kv_comes_before_hidden_states_in_one_batch(make_restoring_cell: MakeCell) -> None:
    """The first chunk is loaded from the host pool, the others are restored: the run begins where the load ends."""
    cell = make_restoring_cell(host_writes="through")
    cell.serve(prompt(1))
    put_hidden(cell, prompt(3))
    cell.feed(flush_device())

    cell.submit(prompt(3))
    bring(cell, 3)

    assert cell.admitted[-1].cached_tokens == CHUNK
    assert (restores(cell)[0].start, restores(cell)[-1].end) == (CHUNK, 3 * CHUNK)
    cell.drain()


def test_refused_hidden_states_cost_an_attempt_and_are_not_used_again(make_restoring_cell: MakeCell) -> None:
    """A page that is not what was saved: the request starts again, computes, and no failure is held against it."""
    cell = make_restoring_cell(max_attempts=1)
    put_hidden(cell, prompt(3))
    name = cell.submit(prompt(3))
    bring(cell, 2)
    rot_hidden(cell)

    worker_goes_on(cell)

    request = cell.state.requests[name]
    assert (request.hidden.refusals, request.failures, request.hidden.run) == (1, 0, None)
    assert cell.state.counters["restores_refused"] == 1
    cell.drain()
    assert hidden_pool(cell).leased == 0
    assert cell.state.counters["hidden_runs"] == 1


def test_refused_hidden_states_give_way_to_kv(make_restoring_cell: MakeCell) -> None:
    """Where the disk has both forms, the second attempt fetches the other."""
    cell = make_restoring_cell()
    put_on_disk(cell, prompt(3))
    put_hidden(cell, prompt(3))
    name = cell.submit(prompt(3))
    assert cell.state.requests[name].hidden.run is not None
    bring(cell, 2)
    rot_hidden(cell)
    cell.drain()

    assert cell.state.counters["fetches_done"] == 1
    assert cell.admitted[-1].disk_tokens == 3 * CHUNK


def test_compute_speed_is_not_learned_from_restored_tokens(make_restoring_cell: MakeCell) -> None:
    """The worker learns how fast it restores, and its fit of computing has seen computed tokens alone."""
    cell = make_restoring_cell()
    put_hidden(cell, prompt(3))
    cell.serve(prompt(3))

    worker = cell.state.workers["worker-0"]
    assert worker.restoring.amount > 2 * CHUNK
    assert worker.speed.reports == 0  # The model worker says nothing of computing.
    assert cell.state.counters["restored_tokens"] == 3 * CHUNK


def flush_device() -> FlushCache:
    """Forget what is on devices."""
    return FlushCache(call_id="call", tiers=("device",))


def test_restoring_that_is_slower_than_thought_takes_more_of_a_budget(make_restoring_cell: MakeCell) -> None:
    """Once it was observed to take half the time of computing, twice the budget's tokens are restored at once."""
    cell = make_restoring_cell(max_batch_tokens=CHUNK, batches_ahead=1)
    worker = cell.state.workers["worker-0"]
    worker.restoring.note(1000.0, 1000.0 * COSTS.token_us / 2)
    put_hidden(cell, prompt(3))
    cell.submit(prompt(3))
    bring_at_once(cell, 3)

    assert [(order.start, order.end) for order in restores(cell)] == [(0, 2 * CHUNK)]


def test_a_budget_that_restoring_has_used_up_computes_nothing_more(make_restoring_cell: MakeCell) -> None:
    """A restored token counts as much as a computed one here: the other request's chunk is in a later batch."""
    cell = make_restoring_cell(max_batch_tokens=CHUNK, batches_ahead=1, restoring=HIDDEN, schedule="fcfs")
    cell.state.workers["worker-0"].restoring.note(1000.0, 1000.0 * COSTS.token_us)
    put_hidden(cell, prompt(2))
    name = cell.submit(prompt(2))
    bring_at_once(cell, 2)
    cell.submit(prompt(1, kind=5))

    (batch,) = orders_of(cell, RunBatch)
    assert [(order.request_id, order.end) for order in batch.restores] == [(name, CHUNK)]
    assert batch.chunks == ()
    assert cell.state.workers["worker-0"].work.running == [name]
    cell.drain()


def test_a_restoration_counts_as_a_load_of_its_bytes() -> None:
    """Hidden states of a quarter of KV's bytes, restored in an eighth of the time of computing."""
    draft = BatchBuilder(budget=100, places=1)
    order = RestoreChunk(
        request_id="a", attempt=1, start=0, end=64, storage_id="s", hidden_pages=b"", identities=b"", recomputed=0
    )

    draft.add_restored(Chunk("a", 1, 0, 64, is_restored=True), order, 1 / 8, 1 / 4)

    assert (draft.budget, draft.loaded, draft.beside, draft.computed, draft.restored) == (92, 16, 8, 0, 64)


def test_the_load_of_fetched_kv_completes_its_prediction(make_restoring_cell: MakeCell) -> None:
    """The batch's time to load as many tokens is added to the fetch's; a failed load says nothing."""
    cell = make_restoring_cell()
    put_on_disk(cell, prompt(3))
    cell.submit(prompt(3))
    bring(cell, 4)
    request = cell.state.requests["request-1"]
    (batch,) = cell.state.workers["worker-0"].work.batches
    fetched = request.prefetch.kv
    done: dict[str, Any] = {
        "worker_id": "worker-0",
        "incarnation": "1",
        "plan": 1,
        "loaded_tokens": 6 * CHUNK,
        "load_us": 1000,
    }

    note_loads(cell.state, batch, BatchDone(**done))

    found = cell.state.predictions.by_kind["kv from disk"]
    assert fetched is not None
    assert (found.observations, found.predicted_us) == (1, fetched.predicted_us)
    assert found.observed_us == pytest.approx(fetched.disk_us + 500)
    assert request.prefetch.kv is None
