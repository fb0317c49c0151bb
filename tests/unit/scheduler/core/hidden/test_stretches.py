"""Runs of hidden states with holes: what lies where, and a request that is restored and computed in turns."""

from collections.abc import Callable
from typing import Any

import pytest

from services.scheduler.core.cache.identities import ChunkNames
from services.scheduler.core.cache.prefix_tree import IDENTITY_BYTES
from services.scheduler.core.hidden.hidden_fetches import cut_off_hidden
from services.scheduler.core.hidden.hidden_in_flight import (
    LONGEST_HOLE,
    MOST_STRETCHES,
    HiddenRun,
    HiddenTier,
    Hole,
    end_at,
    hole_at,
    holes_between,
    identity_before,
    next_hidden,
    page_at,
    stretch_end,
    stretches_behind,
    tokens_of_run,
)
from services.scheduler.core.state import Storage
from services.scheduler.core.step import Step
from shared.ids import chain_root
from shared.messages.base import pack_int32
from shared.messages.cell_events import FlushCache
from shared.messages.pools import HIDDEN
from shared.messages.storage_plans import FetchChunks
from shared.messages.worker_plans import AdmitRequest, PrefillChunk, RestoreChunk, RunBatch
from tests.present import present
from tests.stateful.cell_model import CellModel, namespace
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders, orders_of, timer_of, worker_goes_on
from tests.unit.scheduler.core.fetching import CHUNK, PAGE, chunks_of, prompt, put_on_disk
from tests.unit.scheduler.core.restoring_cells import SLOW_DISK, bring, hidden_pool, put_hidden, restores, rot_hidden

EACH = CHUNK // PAGE


@pytest.fixture
def names_of(make_cell: MakeCell) -> Callable[..., ChunkNames]:
    """The names of a prompt's chunks."""
    tree = make_cell(page_size=PAGE).state.tree
    return lambda tokens: ChunkNames(tree, namespace(), pack_int32(tokens), [], len(tokens) // PAGE)


def put_hidden_with_holes(cell: CellModel, tokens: list[int], holes: list[int]) -> list[bytes]:
    """Let the disk hold hidden states of all whole chunks of a prompt but for these; returns the names of all."""
    names = put_hidden(cell, tokens)
    for index in holes:
        del cell.state.storages["storage"].hidden.chunks[names[index]]
        del cell.hidden_disks["storage"].chunks[names[index]]
    return names


def planned(cell: CellModel) -> list[tuple[bool, int, int]]:
    """What is ordered of a request, in turn, what follows itself put together: (restored or not, first token, end)."""
    found: list[Any] = []
    for outputs in cell.outputs:
        for batch in orders(outputs, RunBatch):
            chunks: tuple[RestoreChunk | PrefillChunk, ...] = (*batch.restores, *batch.chunks)
            for chunk in chunks:
                is_restored, start = isinstance(chunk, RestoreChunk), chunk.start
                if is_restored and found and found[-1][::2] == (True, start):
                    start = found.pop()[1]
                found.append((is_restored, start, chunk.end))
    return found


def a_run(depth: int = 0, end: int = 6 * CHUNK) -> HiddenRun:
    """A run of six chunks with holes at the second and at the fourth and fifth."""
    holes = [Hole(CHUNK, 2 * CHUNK, b"a" * 16), Hole(3 * CHUNK, 5 * CHUNK, b"b" * 16)]
    fields: dict[str, Any] = {
        "storage_id": "storage",
        "fetch": 0,
        "pages": b"",
        "identities": b"x" * 16,
        "recomputed": 0,
    }
    return HiddenRun(depth=depth, end=end, arrived=end, goal=6 * CHUNK, holes=holes, **fields)


def test_pages_are_packed_without_holes() -> None:
    """A position in a hole is where the first page behind it is."""
    run = a_run()

    places = [page_at(run, position, PAGE) for position in range(0, 6 * CHUNK + 1, CHUNK)]

    assert places == [place * EACH for place in (0, 1, 1, 2, 2, 2, 3)]
    assert [page_at(a_run(depth=CHUNK + 5), chunk * CHUNK, PAGE) for chunk in (2, 3, 6)] == [0, EACH, 2 * EACH]


def test_positions_know_their_stretch_and_their_hole() -> None:
    """A hole begins with its first token and ends before its last."""
    run = a_run()

    assert [hole_at(run, position) for position in (0, CHUNK - 1, 2 * CHUNK, 5 * CHUNK)] == [None] * 4
    assert [next_hidden(run, position) for position in (CHUNK, 2 * CHUNK - 1, 3 * CHUNK + 7)] == [128, 128, 320]
    assert [stretch_end(run, position, 6 * CHUNK) for position in (0, 2 * CHUNK, 5 * CHUNK)] == [64, 192, 384]
    assert tokens_of_run(run, 10, 3 * CHUNK + 1) == 2 * CHUNK - 10


def test_a_run_that_ends_in_a_hole_ends_before_it() -> None:
    """What was computed of the hole is behind it all the same; holes further on are forgotten."""
    cut, behind, computed = a_run(), a_run(), a_run(depth=CHUNK + 9)

    end_at(cut, 3 * CHUNK)
    end_at(behind, 2 * CHUNK)
    end_at(computed, 2 * CHUNK)

    assert (cut.end, cut.goal, len(cut.holes)) == (3 * CHUNK, 3 * CHUNK, 1)
    assert (behind.end, behind.goal, behind.holes) == (CHUNK, CHUNK, [])
    assert (computed.end, computed.goal) == (CHUNK + 9, CHUNK + 9)


def test_what_follows_a_hole_is_chained_to_its_last_page() -> None:
    """Where a run ends at no hole, its own last page is what goes before."""
    assert identity_before(a_run(end=CHUNK)) == b"a" * 16
    assert identity_before(a_run()) == b"x" * 16


def test_stretches_are_what_the_disk_has(names_of: Callable[..., ChunkNames]) -> None:
    """Of twelve chunks the disk has four stretches; those before the one that is asked for are not looked at."""
    names = names_of(prompt(12))
    known = {names[index]: None for index in (0, 1, 3, 4, 6, 9, 10, 11)}
    storage = Storage(storage_id="s", incarnation="1", node="n", host_bytes=0, hidden=HiddenTier(chunks=known))

    assert stretches_behind(storage, names, 2, 99) == ((3, 5), (6, 7), (9, 12))
    assert stretches_behind(storage, names, 2, 4) == ((3, 4),)
    assert stretches_behind(storage, names, 12, 99) == ()


def test_the_search_for_stretches_is_bounded(names_of: Callable[..., ChunkNames]) -> None:
    """By how long a hole may be, and by how many stretches there may be."""
    names = names_of(prompt(2 * MOST_STRETCHES + 4))
    far = Storage(storage_id="s", incarnation="1", node="n", host_bytes=0)
    far.hidden.chunks = {names[LONGEST_HOLE + 1]: None}
    many = Storage(storage_id="s", incarnation="1", node="n", host_bytes=0)
    many.hidden.chunks = {names[index]: None for index in range(0, names.count, 2)}

    assert stretches_behind(far, names, 0, 99) == ()
    assert stretches_behind(far, names, 1, 99) == ((LONGEST_HOLE + 1, LONGEST_HOLE + 2),)
    assert len(stretches_behind(many, names, 0, names.count)) == MOST_STRETCHES


def test_holes_lie_before_and_between_stretches(names_of: Callable[..., ChunkNames]) -> None:
    """Each knows the page before its end, or the root."""
    names = names_of(prompt(6))

    holes = holes_between(names, 0, [(1, 2), (2, 3), (5, 6)], PAGE, namespace())

    assert [(hole.start, hole.end) for hole in holes] == [(0, CHUNK), (3 * CHUNK, 5 * CHUNK)]
    assert [hole.above for hole in holes] == [names[0], names[4]]
    assert len(names[0]) == IDENTITY_BYTES
    assert identity_before(HiddenRun("s", 0, 0, 0, 0, b"", b"", 0, holes=holes)) == names[0] != chain_root(namespace())


@pytest.mark.parametrize(
    ("holes", "spans"),
    [
        ([1], [(True, 0, 1), (False, 1, 2), (True, 2, 6)]),
        ([1, 4], [(True, 0, 1), (False, 1, 2), (True, 2, 4), (False, 4, 5), (True, 5, 6)]),
        ([1, 3, 4], [(True, 0, 1), (False, 1, 2), (True, 2, 3), (False, 3, 5), (True, 5, 6)]),
        ([5], [(True, 0, 5)]),
        ([4, 5], [(True, 0, 4)]),
    ],
)
def test_holes_are_computed_and_stretches_restored_in_turn(
    make_restoring_cell: MakeCell, holes: list[int], spans: list[tuple[bool, int, int]]
) -> None:
    """What is behind the last stretch is computed with the rest of the prompt."""
    cell = make_restoring_cell()
    put_hidden_with_holes(cell, prompt(6), holes)

    cell.serve(prompt(6))

    last = spans[-1][2]
    expected = [(is_restored, start * CHUNK, end * CHUNK) for is_restored, start, end in spans]
    assert planned(cell) == [*expected, (False, last * CHUNK, 6 * CHUNK + 3)]
    assert hidden_pool(cell).leased == 0
    assert cell.state.requests == {}
    fetched = orders_of(cell, FetchChunks)
    assert [order.depth for order in fetched] == [start for is_restored, start, _ in expected if is_restored]


def test_the_next_stretch_is_fetched_while_the_one_before_is_restored(make_restoring_cell: MakeCell) -> None:
    """Its fetch begins when the one before is over, whatever the worker has done by then."""
    cell = make_restoring_cell()
    put_hidden_with_holes(cell, prompt(4), [1])
    name = cell.submit(prompt(4))

    bring(cell, 2)

    run = cell.state.requests[name].hidden.run
    assert run is not None
    assert (run.end, run.arrived, run.goal) == (4 * CHUNK, 2 * CHUNK, 4 * CHUNK)
    assert cell.state.requests[name].computed == 0
    assert [order.depth for order in orders_of(cell, FetchChunks)] == [0, 2 * CHUNK]
    assert planned(cell) == [(True, 0, CHUNK), (False, CHUNK, 2 * CHUNK)]
    cell.drain()


def test_a_hole_that_is_longer_than_a_budget_takes_several_batches(make_restoring_cell: MakeCell) -> None:
    """Each computes as much as it may, and none goes past where hidden states go on."""
    cell = make_restoring_cell(max_batch_tokens=100)
    put_hidden_with_holes(cell, prompt(5), [1, 2, 3])

    cell.serve(prompt(5))

    computed = [(start, end) for is_restored, start, end in planned(cell) if not is_restored]
    assert computed == [(64, 164), (164, 256), (320, 323)]


def test_a_prompt_that_goes_on_with_a_hole_computes_it_first(make_restoring_cell: MakeCell) -> None:
    """Two chunks are on the device, the third has no hidden states and no KV: the request is admitted at once."""
    cell = make_restoring_cell(disk_writes="off")
    cell.serve(prompt(2))
    put_hidden_with_holes(cell, prompt(6), [2])

    name = cell.submit(prompt(6))

    assert cell.admitted[-1].request_id == name
    assert present(cell.state.requests[name].hidden.run).goal == 6 * CHUNK
    cell.drain()
    assert planned(cell)[-3:] == [
        (False, 2 * CHUNK, 3 * CHUNK),
        (True, 3 * CHUNK, 6 * CHUNK),
        (False, 6 * CHUNK, 6 * CHUNK + 3),
    ]
    assert hidden_pool(cell).leased == 0


def test_the_kv_of_a_hole_is_shared_like_any_other(make_restoring_cell: MakeCell) -> None:
    """A second request finds all of it on the device."""
    cell = make_restoring_cell()
    put_hidden_with_holes(cell, prompt(4), [1])
    cell.serve(prompt(4))

    cell.submit(prompt(4, tail=5))

    assert cell.admitted[-1].device_tokens == 4 * CHUNK
    cell.drain()


def test_what_is_saved_begins_behind_the_last_stretch(make_restoring_cell: MakeCell) -> None:
    """A worker captures tokens in a row: what lies between two stretches is not among them."""
    cell = make_restoring_cell(disk_writes="through", min_prefetch_tokens=1)
    names = put_hidden_with_holes(cell, prompt(6), [1, 4, 5])

    cell.serve(prompt(6), max_tokens=2)

    (admitted,) = orders_of(cell, AdmitRequest)
    assert admitted.hidden_lease is not None
    assert admitted.hidden_lease.depth == 4 * CHUNK
    known = cell.state.storages["storage"].hidden.chunks
    assert [name in known for name in names] == [True, False, True, True, True, True]


def test_where_computing_is_faster_no_stretch_is_fetched(make_restoring_cell: MakeCell) -> None:
    """The costs decide on stretches as on all else."""
    cell = make_restoring_cell(costs=SLOW_DISK)
    put_hidden_with_holes(cell, prompt(4), [1])

    cell.submit(prompt(4))

    assert not orders_of(cell, FetchChunks)
    cell.drain()


@pytest.mark.parametrize("restoring", ["planned", HIDDEN])
def test_kv_of_all_gives_way_to_hidden_states_with_a_hole_where_that_is_asked_for(
    make_restoring_cell: MakeCell, restoring: str
) -> None:
    """Left to itself the planner fetches KV, for computing the hole costs more than all of its disk time."""
    cell = make_restoring_cell(restoring=restoring)
    put_on_disk(cell, prompt(4))
    put_hidden_with_holes(cell, prompt(4), [1])

    cell.serve(prompt(4))

    fetched = [order.form for order in orders_of(cell, FetchChunks)]
    assert fetched == (["kv"] if restoring == "planned" else [HIDDEN, HIDDEN])


def test_a_chunk_of_a_later_stretch_that_is_gone_ends_the_run_there(make_restoring_cell: MakeCell) -> None:
    """The first stretch is restored, the rest is computed in one go, and no page stays behind."""
    cell = make_restoring_cell()
    names = put_hidden_with_holes(cell, prompt(6), [1])
    del cell.hidden_disks["storage"].chunks[names[3]]
    name = cell.submit(prompt(6))
    bring(cell, 2)
    bring(cell, 2)
    assert cell.state.requests[name].hidden.refusals == 1
    assert present(cell.state.requests[name].hidden.run).goal == 3 * CHUNK

    cell.drain()

    assert [(order.start, order.end) for order in restores(cell)] == [(0, CHUNK), (2 * CHUNK, 3 * CHUNK)]
    assert hidden_pool(cell).leased == 0


def test_a_later_stretch_of_which_nothing_comes_is_computed(make_restoring_cell: MakeCell) -> None:
    """The run ends before the hole though that was being computed for it."""
    cell = make_restoring_cell()
    names = put_hidden_with_holes(cell, prompt(6), [1])
    del cell.hidden_disks["storage"].chunks[names[2]]
    cell.serve(prompt(6))

    assert [(order.start, order.end) for order in restores(cell)] == [(0, CHUNK)]
    assert hidden_pool(cell).leased == 0


@pytest.mark.parametrize("is_hole_computed", [False, True])
def test_a_late_later_stretch_is_cut_off(make_restoring_cell: MakeCell, is_hole_computed: bool) -> None:
    """The deadline of its fetch passes before or after the hole was computed: the rest is computed."""
    cell = make_restoring_cell()
    put_hidden_with_holes(cell, prompt(6), [1])
    name = cell.submit(prompt(6))
    bring(cell, 2)
    if is_hole_computed:
        worker_goes_on(cell)
        worker_goes_on(cell)
        assert cell.state.requests[name].computed == 2 * CHUNK
    cell.fire(timer_of(cell, "fetch."))

    assert (cell.state.requests[name].hidden.run is None) == is_hole_computed
    cell.drain()
    assert cell.workers["worker-0"].restored_tokens == CHUNK
    assert (hidden_pool(cell).leased, cell.state.storages["storage"].fetching.late) == (0, 0)


def test_a_refused_chunk_of_a_later_stretch_costs_one_attempt(make_restoring_cell: MakeCell) -> None:
    """What was restored and computed before it stays; the next attempt does without hidden states."""
    cell = make_restoring_cell()
    put_hidden_with_holes(cell, prompt(6), [1])
    name = cell.submit(prompt(6))
    bring(cell, 2)
    worker_goes_on(cell)
    worker_goes_on(cell)
    assert cell.state.requests[name].computed == 2 * CHUNK
    bring(cell, 1)
    rot_hidden(cell)
    cell.drain()

    assert cell.state.counters["restores_refused"] == 1
    assert cell.admitted[-1].cached_tokens == 2 * CHUNK
    assert hidden_pool(cell).leased == 0


@pytest.mark.parametrize("chunks", [0, 1, 2, 3, 4])
def test_a_request_that_is_cancelled_gives_all_pages_back(make_restoring_cell: MakeCell, chunks: int) -> None:
    """Wherever it has come to: the fetch that runs keeps its own until it is over."""
    cell = make_restoring_cell()
    put_hidden_with_holes(cell, prompt(6), [1, 3])
    name = cell.submit(prompt(6))
    bring(cell, chunks)

    cell.cancel(name)
    cell.drain()

    assert hidden_pool(cell).leased == 0
    assert cell.state.hidden_fetches == {}


def test_a_worker_that_is_lost_within_a_hole_gives_the_run_up(make_restoring_cell: MakeCell) -> None:
    """Its request begins anew elsewhere, and all pages come back."""
    cell = make_restoring_cell()
    put_hidden_with_holes(cell, prompt(6), [1])
    name = cell.submit(prompt(6))
    bring(cell, 2)
    worker_goes_on(cell)

    cell.lose_worker("worker-0")
    assert cell.state.requests[name].hidden.run is None
    cell.add_worker("worker-1", pages=64)
    cell.drain()

    assert hidden_pool(cell).leased == 0


def test_a_small_pool_brings_one_part_after_another(make_restoring_cell: MakeCell) -> None:
    """Half of it is two chunks: stretches are brought in parts, and what follows a hole waits for pages."""
    cell = make_restoring_cell(hidden_pages=4 * EACH)
    put_hidden_with_holes(cell, prompt(7), [3])

    cell.serve(prompt(7))

    assert cell.workers["worker-0"].restored_tokens == 6 * CHUNK
    assert hidden_pool(cell).leased == 0


def test_a_run_is_cut_where_it_has_arrived(make_restoring_cell: MakeCell) -> None:
    """Called off between two stretches it ends before the hole."""
    cell = make_restoring_cell()
    put_hidden_with_holes(cell, prompt(6), [1])
    name = cell.submit(prompt(6))
    bring(cell, 2)
    request = cell.state.requests[name]
    (fetch,) = cell.state.hidden_fetches.values()
    assert request.hidden.run is not None
    assert request.hidden.run.arrived == 2 * CHUNK

    cut_off_hidden(Step(cell.state, cell.seq, cell.time_ns), fetch)

    assert (request.hidden.run.end, request.hidden.run.goal, request.hidden.run.holes) == (CHUNK, CHUNK, [])
    assert len(request.hidden.run.pages) // 4 == EACH
    assert len(fetch.pages) // 4 == 4 * EACH
    assert chunks_of(prompt(1)).keys() == {request.hidden.run.identities[-16:]}


def test_a_hole_that_cannot_be_computed_costs_an_attempt_and_no_page(make_restoring_cell: MakeCell) -> None:
    """The request is preempted with its run; the next attempt begins another where the device's KV ends."""
    cell = make_restoring_cell()
    put_hidden_with_holes(cell, prompt(6), [1])
    name = cell.submit(prompt(6))
    bring(cell, 2)
    worker_goes_on(cell)
    assert cell.state.requests[name].computed == CHUNK
    cell.workers["worker-0"].fail_next_chunk_of = name

    cell.drain()

    assert (cell.state.counters["chunks_failed"], cell.state.counters["hidden_runs"]) == (1, 2)
    assert cell.admitted[-1].cached_tokens == CHUNK
    assert cell.workers["worker-0"].restored_tokens == 5 * CHUNK
    assert hidden_pool(cell).leased == 0


def test_what_the_turns_of_a_conversation_left_is_restored(make_restoring_cell: MakeCell) -> None:
    """Each of five turns leaves one chunk that nobody passes through the model at once; all others come back."""
    cell = make_restoring_cell(disk_writes="through", lease_tokens=64)
    tokens = prompt(3, tail=30)
    for turn in range(5):
        name = cell.serve(list(tokens), max_tokens=80, ignore_eos=True)
        last, answer = list(tokens), cell.gateways["gateway"].tokens[name]
        tokens += answer + [20_000 + 200 * turn + place for place in range(112)]
    known = len(cell.state.storages["storage"].hidden.chunks)
    cell.feed(FlushCache(call_id="call", tiers=("device", "host")))

    cell.serve(last, max_tokens=1)

    whole = len(last) // CHUNK
    assert cell.state.counters["hidden_holes_passed"] == 4
    assert cell.workers["worker-0"].restored_tokens == (whole - 4) * CHUNK
    assert known >= whole - 4
    assert cell.workers["worker-0"].restored_tokens >= 0.6 * len(last)
