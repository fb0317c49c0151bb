"""Which requests get a sparse prefix, of what, and what nobody else gets by it."""

import pytest
from msgspec import structs

from services.scheduler.core.cache.page_pool import PagePool
from services.scheduler.core.queue import batching
from services.scheduler.core.queue.batch_builder import BatchBuilder
from services.scheduler.core.sparse.sparse_prefixes import begin_sparse, pages_for_chosen, sparse_order
from services.scheduler.core.sparse.sparse_records import SparseSpan
from services.scheduler.core.step import Step
from shared.errors import InvariantViolated
from shared.messages.base import unpack_int32
from shared.messages.cell_events import FlushCache
from shared.messages.pools import HIDDEN
from shared.messages.requests import Importance
from shared.messages.storage_events import ChunksDropped
from shared.messages.storage_plans import BackupPages, CreateHostPool, FetchChunks, SaveChunks
from tests.present import present
from tests.stateful.cell_model import CellModel, namespace
from tests.stateful.model_hidden import COSTS
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders_of, path_of, worker_goes_on
from tests.unit.scheduler.core.fetching import CHUNK, PAGE, prompt, put_on_disk
from tests.unit.scheduler.core.reading_in_part import QUARTER, answered, put_in_parts, sparse_cell, storage_of
from tests.unit.scheduler.core.restoring_cells import SLOW_DISK, put_hidden

EACH = CHUNK // PAGE
SLOW_DEVICE = structs.replace(COSTS, token_us=1e5)
"""Of a worker that does anything rather than compute."""


@pytest.fixture
def cell_that(make_cell: MakeCell, monkeypatch: pytest.MonkeyPatch) -> MakeCell:
    """A cell whose disk can be read in part. Keys of its model have one value, of which codes would be larger."""
    monkeypatch.setattr("services.scheduler.core.sparse.sparse_costs.code_bytes", lambda head_dim: head_dim)
    return lambda **settings: sparse_cell(make_cell, **settings)


def device(cell: CellModel) -> PagePool:
    """The core's pool of the worker's pages."""
    return cell.state.workers["worker-0"].pool


def known_tokens(cell: CellModel, tokens: list[int]) -> int:
    """Leading tokens that the tree knows."""
    return sum(pages for _, pages in path_of(cell, tokens)) * PAGE


def test_what_is_only_on_the_disk_is_read_in_part(cell_that: MakeCell) -> None:
    """The request waits for nothing; its table has no pages there, and a quarter as many beside it."""
    cell = cell_that()
    names = put_in_parts(cell, prompt(4))

    name = cell.submit(prompt(4), importance=QUARTER)

    (order,) = cell.admitted
    sparse = order.sparse
    assert sparse is not None
    assert (sparse.start, sparse.end, sparse.depth) == (0, 4 * CHUNK, 0)
    assert sparse.chunks == b"".join(names)
    assert (sparse.storage_id, sparse.namespace, sparse.importance) == ("storage", namespace(), QUARTER)
    assert len(unpack_int32(sparse.pages)) == EACH
    assert unpack_int32(order.pages)[: 4 * EACH] == [-1] * 4 * EACH
    assert min(unpack_int32(order.pages)[4 * EACH :]) >= 0
    assert order.cached_tokens == 4 * CHUNK
    assert not orders_of(cell, FetchChunks)
    assert device(cell).leased == EACH + 1
    assert cell.state.requests[name].own_pages == order.pages[4 * EACH * 4 :] + sparse.pages
    cell.drain()
    assert device(cell).leased == 0
    assert cell.workers["worker-0"].sparse_tokens == 4 * CHUNK


def test_usage_counts_what_is_exact_alone(cell_that: MakeCell) -> None:
    """The worker says how much of a sparse prefix was loaded."""
    cell = cell_that()
    put_in_parts(cell, prompt(4))

    order = answered(cell, prompt(4), importance=QUARTER)

    found = (order.device_tokens, order.host_tokens, order.disk_tokens, order.remote_tokens, order.neighbour_tokens)
    assert found == (0, 0, 0, 0, 0)
    assert cell.state.counters["sparse_tokens_planned"] == cell.state.counters["sparse_tokens_read"] == 4 * CHUNK
    assert cell.state.counters["sparse_disk_bytes"] > 0


def test_nothing_computed_behind_it_is_kept(cell_that: MakeCell) -> None:
    """Neither in the tree, nor in host memory, nor on the disk, whatever the settings of writing say."""
    cell = cell_that(host_writes="through", disk_writes="through", admission="all")
    put_in_parts(cell, prompt(4))

    answered(cell, prompt(4, tail=2 * CHUNK), importance=QUARTER, max_tokens=40, ignore_eos=True)

    assert known_tokens(cell, prompt(4, tail=2 * CHUNK)) == 0
    assert not orders_of(cell, SaveChunks)
    assert not orders_of(cell, BackupPages)
    assert cell.state.tree.nodes == {}


def test_a_request_that_does_not_allow_it_is_exact(cell_that: MakeCell) -> None:
    """The same chunks are fetched for it as a whole."""
    cell = cell_that()
    put_in_parts(cell, prompt(4))

    order = answered(cell, prompt(4))

    assert order.sparse is None
    assert order.disk_tokens == 4 * CHUNK
    assert len(orders_of(cell, FetchChunks)) == 1


@pytest.mark.parametrize(
    ("restoring", "token_us", "is_sparse"),
    [("planned", 1, False), ("planned", 100_000, True), ("important", 1, True)],
)
def test_without_a_profile_what_was_observed_decides(
    cell_that: MakeCell, restoring: str, token_us: int, is_sparse: bool
) -> None:
    """Computing that was seen to be faster than the calls of reading in part is taken, unless that is forbidden."""
    cell = cell_that(restoring=restoring)
    put_in_parts(cell, prompt(4))
    cell.state.workers["worker-0"].speed.note_compute(100, 0, 100 * token_us)

    order = answered(cell, prompt(4), importance=QUARTER)

    assert cell.state.workers["worker-0"].restoration is None
    assert (order.sparse is not None) is is_sparse


def test_what_the_worker_can_reuse_is_used_exactly(cell_that: MakeCell) -> None:
    """Two chunks are on the device: they are shared, and only what follows is sparse."""
    cell = cell_that()
    answered(cell, prompt(2), max_tokens=1)
    put_in_parts(cell, prompt(6))

    cell.submit(prompt(6), importance=QUARTER)

    order = cell.admitted[-1]
    assert order.sparse is not None
    assert (order.device_tokens, order.sparse.start, order.sparse.depth, order.sparse.end) == (
        2 * CHUNK,
        2 * CHUNK,
        2 * CHUNK,
        6 * CHUNK,
    )
    assert -1 not in unpack_int32(order.pages)[: 2 * EACH]
    cell.drain()
    assert known_tokens(cell, prompt(6)) == 2 * CHUNK


def test_host_copies_are_loaded_in_front_of_it(cell_that: MakeCell) -> None:
    """What is in host memory is loaded and enters the device's part of the tree; then comes the sparse part."""
    cell = cell_that(host_writes="through")
    answered(cell, prompt(2), max_tokens=1)
    cell.feed(FlushCache(call_id="call", tiers=("device",)))
    put_in_parts(cell, prompt(6))

    order = answered(cell, prompt(6), importance=QUARTER)

    assert order.sparse is not None
    assert (order.host_tokens, order.sparse.start, order.sparse.end) == (2 * CHUNK, 2 * CHUNK, 6 * CHUNK)
    assert known_tokens(cell, prompt(6)) == 2 * CHUNK


def test_it_begins_within_a_chunk_where_the_worker_has_a_part_of_it(cell_that: MakeCell) -> None:
    """That chunk is named as a whole, and read from the first page on that is missing."""
    cell = cell_that()
    tokens = prompt(4)
    answered(cell, [*tokens[: CHUNK + PAGE], 5], max_tokens=1)
    names = put_in_parts(cell, tokens)

    order = answered(cell, tokens, importance=QUARTER)

    assert order.sparse is not None
    assert (order.device_tokens, order.sparse.start, order.sparse.depth) == (CHUNK + PAGE, CHUNK + PAGE, CHUNK)
    assert order.sparse.chunks == b"".join(names[1:])


def test_the_last_token_is_always_computed(cell_that: MakeCell) -> None:
    """A prompt of whole chunks is not sparse to its end."""
    cell = cell_that()
    put_in_parts(cell, prompt(4))

    assert present(answered(cell, prompt(4, tail=0), importance=QUARTER).sparse).end == 3 * CHUNK


@pytest.mark.parametrize("settings", [{"restoring": "kv"}, {"restoring": HIDDEN}, {"restoring": "recompute"}])
def test_ways_that_lose_nothing_are_compared_without_it(cell_that: MakeCell, settings: dict[str, str]) -> None:
    """Only the planner weighs it."""
    cell = cell_that(**settings)
    put_in_parts(cell, prompt(4))

    assert answered(cell, prompt(4), importance=QUARTER).sparse is None


@pytest.mark.parametrize("options", [{"read": False}, {"prompt_logprobs": 1}])
def test_who_may_not_reuse_anything_reads_nothing_in_part(cell_that: MakeCell, options: dict[str, int]) -> None:
    """Every token is computed."""
    cell = cell_that()
    put_in_parts(cell, prompt(4))

    order = answered(cell, prompt(4), importance=QUARTER, **options)

    assert (order.sparse, order.cached_tokens) == (None, 0)


@pytest.mark.parametrize("ratio", [0.0, -1.0, 0.001, 1.5, float("nan")])
def test_a_ratio_that_no_worker_takes_is_none(cell_that: MakeCell, ratio: float) -> None:
    """The request is answered exactly rather than not at all."""
    cell = cell_that()
    put_in_parts(cell, prompt(4))

    assert answered(cell, prompt(4), importance=Importance(ratio=ratio)).sparse is None


def test_too_little_is_not_read_in_part(cell_that: MakeCell) -> None:
    """The bound is that of any hit below host memory."""
    cell = cell_that(min_prefetch_tokens=4 * CHUNK + 1)
    put_in_parts(cell, prompt(4))

    assert answered(cell, prompt(4), importance=QUARTER).sparse is None


def test_a_disk_that_cannot_be_read_in_part_is_not(cell_that: MakeCell) -> None:
    """What a storage lists without having said that it keeps such a form is not believed."""
    cell = cell_that(keeps_sparse=False)
    put_in_parts(cell, prompt(4))

    assert not storage_of(cell).sparse.chunks
    assert answered(cell, prompt(4), importance=QUARTER).sparse is None


def test_a_worker_that_reads_no_parts_gets_none(cell_that: MakeCell) -> None:
    """No attempt is lost on it, and the prefix is fetched whole."""
    cell = cell_that()
    put_in_parts(cell, prompt(4))
    cell.state.workers["worker-0"].reads_no_parts = "sinks"

    order = answered(cell, prompt(4), importance=QUARTER)

    assert (order.sparse, order.disk_tokens, order.attempt) == (None, 4 * CHUNK, 1)
    assert "sparse_choices_dropped" not in cell.state.counters


def test_a_storage_whose_workers_read_no_parts_keeps_no_copies(cell_that: MakeCell) -> None:
    """It hears so with the order for its pool, and its disk may hold hidden states."""
    read, unread = cell_that(), cell_that(reads_no_parts="sinks")

    assert [order.is_read_in_part for order in orders_of(read, CreateHostPool)] == [True]
    assert [order.is_read_in_part for order in orders_of(unread, CreateHostPool)] == [False]
    assert (storage_of(read).sparse.is_kept, storage_of(read).sparse.is_left_out) == (True, False)
    assert (storage_of(unread).sparse.is_kept, storage_of(unread).sparse.is_left_out) == (False, True)


def test_where_computing_is_faster_it_is_exact(cell_that: MakeCell) -> None:
    """The worker computes the prompt before the disk could have read anything."""
    cell = cell_that(costs=SLOW_DISK)
    put_in_parts(cell, prompt(4))

    order = answered(cell, prompt(4), importance=QUARTER)

    assert order.sparse is None
    assert cell.state.counters["restorations_planned_recompute"] == 1


def test_where_kv_is_as_fast_it_is_exact(cell_that: MakeCell) -> None:
    """The fetch is hidden by what the device does for others; reads within a step never are."""
    cell = cell_that(costs=COSTS, max_running=1)
    put_in_parts(cell, prompt(4))
    cell.submit(prompt(3, kind=2))

    order = answered(cell, prompt(4), importance=QUARTER)

    assert order.sparse is None
    assert order.disk_tokens == 4 * CHUNK


def test_a_slow_disk_is_read_in_part(cell_that: MakeCell) -> None:
    """With a profile, too, where a part of the bytes is the fastest way back."""
    cell = cell_that(costs=SLOW_DEVICE)
    put_in_parts(cell, prompt(4))
    storage_of(cell).fetching.disk_rate.note(1.0, 1000.0)

    name = cell.submit(prompt(4), importance=QUARTER)

    assert cell.admitted[0].sparse is not None
    assert present(cell.state.requests[name].sparse.span).predicted_us > 0
    cell.drain()
    (found,) = cell.state.predictions.by_kind.items()
    assert (found[0], found[1].observations) == ("important tokens from disk", 1)


def test_nobody_waits_for_what_is_lossy(cell_that: MakeCell) -> None:
    """An exact request for the same prompt brings its own KV, and a lossy one does not wait for another lossy one."""
    cell = cell_that(defer_tokens=1, max_batch_tokens=20)
    put_in_parts(cell, prompt(4))
    cell.submit(prompt(4, tail=CHUNK), importance=QUARTER)

    second = cell.submit(prompt(4, tail=CHUNK), importance=QUARTER)
    third = cell.submit(prompt(4, tail=CHUNK))

    assert not cell.state.transient.marks
    assert not cell.state.requests[second].wait.producer
    assert not cell.state.requests[third].wait.producer
    cell.drain()


def test_who_is_passed_over_announces_nothing_that_is_lossy(cell_that: MakeCell) -> None:
    """A look at the queue marks what an exact request would compute when it goes on to the next, and only that."""
    cell = cell_that(defer_tokens=1, max_running=1)
    put_in_parts(cell, prompt(4))
    cell.submit(prompt(1, kind=9), max_tokens=20, ignore_eos=True)
    for tail in (CHUNK, CHUNK + 1):
        cell.submit(prompt(4, tail=tail), importance=QUARTER)
    worker = cell.state.workers["worker-0"]
    forming = batching._Forming(Step(cell.state, cell.seq, cell.time_ns), worker, BatchBuilder(budget=100, places=1))

    found = [forming.look(name) for name in forming.names()]

    assert all(present(candidate).request.sparse.choice is not None for candidate in found)
    assert [present(candidate).compute for candidate in found] == [CHUNK, CHUNK + 1]
    assert not any(present(candidate).request.place.marks for candidate in found)


def test_what_another_is_computing_behind_it_is_waited_for(cell_that: MakeCell) -> None:
    """An exact request computes far more than the span: that is worth waiting for, as for any other hit."""
    cell = cell_that(defer_tokens=1, max_batch_tokens=300, batches_ahead=1)
    tokens = prompt(4, tail=2 * CHUNK)
    exact = cell.submit(tokens)
    put_in_parts(cell, prompt(2))

    lossy = cell.submit(tokens, importance=QUARTER)
    worker_goes_on(cell)

    assert cell.state.requests[lossy].wait.producer == exact
    cell.drain()


def test_what_comes_up_meanwhile_is_used_exactly(cell_that: MakeCell) -> None:
    """It was to be read in part, waited, and has host copies of everything when its turn comes."""
    cell = cell_that(max_running=1)
    put_in_parts(cell, prompt(4))
    cell.submit(prompt(1, kind=9), max_tokens=20, ignore_eos=True)
    exact = cell.submit(prompt(4), priority=1)
    lossy = cell.serve(prompt(4, tail=9), importance=QUARTER)

    order = next(order for order in cell.admitted if order.request_id == lossy)
    assert (order.sparse, order.cached_tokens) == (None, 4 * CHUNK)
    assert [order.request_id for order in cell.admitted].index(exact) == 1


def test_chunks_that_are_dropped_before_admission_end_it_earlier(cell_that: MakeCell) -> None:
    """What is left of the run is what is read."""
    cell = cell_that(max_running=1)
    names = put_in_parts(cell, prompt(4))
    cell.submit(prompt(1, kind=9), max_tokens=20, ignore_eos=True)
    lossy = cell.submit(prompt(4), importance=QUARTER)
    assert present(cell.state.requests[lossy].sparse.choice).chunks == b"".join(names)
    incarnation = cell.storages["storage"].incarnation
    said = ChunksDropped(storage_id="storage", incarnation=incarnation, chunks=b"".join(names[3:]), form="sparse")

    cell.feed(said)
    cell.drain()

    order = next(order for order in cell.admitted if order.request_id == lossy)
    assert order.sparse is not None
    assert order.sparse.end == 3 * CHUNK


def test_a_choice_that_is_void_is_made_anew(cell_that: MakeCell) -> None:
    """The chunks are gone in that form before its turn: they are fetched as KV."""
    cell = cell_that(max_running=1)
    names = put_in_parts(cell, prompt(4))
    cell.submit(prompt(1, kind=9), max_tokens=20, ignore_eos=True)
    lossy = cell.submit(prompt(4), importance=QUARTER)
    incarnation = cell.storages["storage"].incarnation
    cell.storages["storage"].keeps_sparse = False

    cell.feed(ChunksDropped(storage_id="storage", incarnation=incarnation, chunks=b"".join(names), form="sparse"))
    cell.drain()

    order = next(order for order in cell.admitted if order.request_id == lossy)
    assert (order.sparse, order.disk_tokens) == (None, 4 * CHUNK)
    assert cell.state.counters["sparse_choices_dropped"] == 1


def test_a_refusal_costs_an_attempt_and_no_failure(cell_that: MakeCell) -> None:
    """The next attempt is exact; the chunks are not forgotten, and others still read them in part."""
    cell = cell_that(max_attempts=1)
    put_in_parts(cell, prompt(4))
    cell.workers["worker-0"].fails_sparse_reads = True

    order = answered(cell, prompt(4), importance=QUARTER)

    assert (order.attempt, order.sparse, order.disk_tokens) == (2, None, 4 * CHUNK)
    assert cell.state.counters["sparse_refused"] == 1
    assert len(storage_of(cell).sparse.chunks) == 4
    assert device(cell).leased == 0


def test_a_preempted_request_is_decided_for_anew(cell_that: MakeCell) -> None:
    """Two lossy requests outgrow the device; the later one starts again, and may be lossy again."""
    cell = cell_that(pages=14, lease_tokens=PAGE, importance_caching=False)
    put_in_parts(cell, prompt(4))
    cell.submit(prompt(4), importance=QUARTER, max_tokens=5 * PAGE, ignore_eos=True)
    second = cell.serve(prompt(4, tail=5), importance=QUARTER, max_tokens=5 * PAGE, ignore_eos=True)

    assert cell.state.counters["preemptions"] > 0
    again = [order for order in cell.admitted if order.request_id == second][-1]
    assert again.attempt > 1
    assert again.sparse is not None
    assert device(cell).free == device(cell).total


def test_a_lost_worker_takes_its_sparse_prefix_along(cell_that: MakeCell) -> None:
    """The request goes on at another worker, with a sparse prefix of its own."""
    cell = cell_that()
    put_in_parts(cell, prompt(4))
    name = cell.submit(prompt(4), importance=QUARTER, max_tokens=20, ignore_eos=True)
    cell.workers["worker-0"].step()
    cell.lose_worker("worker-0")
    assert cell.state.requests[name].sparse.span is None

    cell.add_worker("worker-1", pages=64)
    cell.drain()

    assert [order.sparse is not None for order in cell.admitted] == [True, True]


def test_a_request_that_moves_is_decided_for_anew(cell_that: MakeCell) -> None:
    """A worker joins on a node without a disk and takes it over: there is nothing to read in part there."""
    cell = cell_that(max_running=1)
    put_in_parts(cell, prompt(4))
    cell.submit(prompt(1, kind=9), max_tokens=200, ignore_eos=True)
    lossy = cell.submit(prompt(4), importance=QUARTER)
    assert cell.state.requests[lossy].sparse.choice is not None

    cell.add_worker("worker-1", node="elsewhere", pages=64)

    (order,) = [order for order in cell.admitted if order.request_id == lossy]
    assert (cell.state.requests[lossy].worker_id, order.sparse) == ("worker-1", None)
    cell.drain()


def test_a_cancelled_request_gives_its_pages_back(cell_that: MakeCell) -> None:
    """Those beside its table, too."""
    cell = cell_that()
    put_in_parts(cell, prompt(4))
    name = cell.submit(prompt(4), importance=QUARTER, max_tokens=20, ignore_eos=True)

    cell.cancel(name)
    cell.drain()

    assert device(cell).free == device(cell).total


def test_a_lost_storage_voids_the_choice(cell_that: MakeCell) -> None:
    """The request computes its prompt."""
    cell = cell_that(max_running=1)
    put_in_parts(cell, prompt(4))
    cell.submit(prompt(1, kind=9), max_tokens=20, ignore_eos=True)
    lossy = cell.submit(prompt(4), importance=QUARTER)

    cell.lose_storage("storage")
    cell.drain()

    order = next(order for order in cell.admitted if order.request_id == lossy)
    assert (order.sparse, order.cached_tokens) == (None, 0)


def test_no_hidden_states_of_it_are_saved(cell_that: MakeCell) -> None:
    """A worker that would get a hidden lease gets none behind a sparse prefix."""
    cell = cell_that(costs=SLOW_DEVICE, hidden_pages=64, hidden_form="0/1/0")
    put_in_parts(cell, prompt(4))
    storage_of(cell).fetching.disk_rate.note(1.0, 1000.0)

    lossy = answered(cell, prompt(4, tail=3 * CHUNK), importance=QUARTER)
    exact = answered(cell, prompt(4, kind=2))

    assert lossy.sparse is not None
    assert lossy.hidden_lease is None
    assert exact.hidden_lease is not None


def test_hidden_states_are_preferred_where_they_are_as_fast(cell_that: MakeCell) -> None:
    """Hidden states of the whole prompt lose nothing."""
    cell = cell_that(costs=COSTS, hidden_pages=64, hidden_form="0/1/0")
    put_in_parts(cell, prompt(4))
    put_hidden(cell, prompt(4))

    order = answered(cell, prompt(4), importance=structs.replace(QUARTER, ratio=1.0))

    assert order.sparse is None
    assert cell.state.counters["restorations_planned_hidden"] == 1


def test_a_prompt_in_the_making_is_joined_rather_than_read_in_part(cell_that: MakeCell) -> None:
    """Its chunks are on their way for another: exact costs nothing more."""
    cell = cell_that()
    put_in_parts(cell, prompt(4))
    cell.submit(prompt(4))

    order = answered(cell, prompt(4, tail=4), importance=QUARTER)

    assert (order.sparse, order.cached_tokens) == (None, 4 * CHUNK)
    assert len(orders_of(cell, FetchChunks)) == 1


def test_a_long_prefix_is_sparse_beyond_one_fetch(cell_that: MakeCell, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is weighed is as much as one fetch brings; what is read is the whole run."""
    monkeypatch.setattr("services.scheduler.core.restoring.restoration_ways.HIDDEN_FETCH_CHUNKS", 2)
    monkeypatch.setattr("services.scheduler.core.restoring.prefetch.FETCH_CHUNKS", 2)
    cell = cell_that(costs=structs.replace(COSTS, token_us=1e7))
    put_in_parts(cell, prompt(5))
    storage_of(cell).fetching.disk_rate.note(1.0, 1e6)

    assert present(answered(cell, prompt(5), importance=QUARTER).sparse).end == 5 * CHUNK


def test_kv_without_parts_is_fetched_before_what_can_be_read_in_part(cell_that: MakeCell) -> None:
    """Chunks whose second form was not made yet come whole, and what follows is decided then."""
    cell = cell_that()
    names = put_in_parts(cell, prompt(4))
    del storage_of(cell).sparse.chunks[names[0]]

    order = answered(cell, prompt(4), importance=QUARTER)

    assert order.sparse is None or order.sparse.start >= CHUNK
    assert orders_of(cell, FetchChunks)


def test_an_exact_request_never_gets_one() -> None:
    """Whoever would order that has broken the core."""
    span = SparseSpan(storage_id="storage", start=0, end=CHUNK, depth=0, chunks=b"n" * 16)

    with pytest.raises(InvariantViolated):
        pages_for_chosen(span, None, PAGE)


def test_neither_admission_nor_order_takes_an_exact_request(cell_that: MakeCell) -> None:
    """Both look at what the request allows."""
    cell = cell_that()
    put_on_disk(cell, prompt(2))
    name = cell.submit(prompt(2))
    request, worker = cell.state.requests[name], cell.state.workers["worker-0"]
    span = SparseSpan(storage_id="storage", start=0, end=CHUNK, depth=0, chunks=b"n" * 16)

    with pytest.raises(InvariantViolated):
        begin_sparse(cell.state, request, worker, span, b"", 0)
    request.sparse.span = span
    with pytest.raises(InvariantViolated):
        sparse_order(request)
