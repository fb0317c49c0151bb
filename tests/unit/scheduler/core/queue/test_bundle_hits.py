"""Bundle hits: requests of one batch that stand on one load."""

import pytest

from services.scheduler.core.queue.batch_builder import BatchBuilder, stand_on, starts_of_loads
from shared.messages.base import pack_int32
from shared.messages.cell_events import FlushCache
from shared.messages.worker_plans import PageLoad, RunBatch
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders_of

SHARED = list(range(40))


@pytest.fixture
def cell(make_cell: MakeCell) -> CellModel:
    """A cell whose host pool alone holds a prompt of 10 pages; a long answer keeps the worker's only place."""
    cell = make_cell(pages=60, host_pages=60, max_running=4, batches_ahead=1, schedule="balanced")
    cell.serve(SHARED, max_tokens=1, request_id="cached")
    for number in range(7):
        cell.serve([500 + number] * 40, max_tokens=1)
    cell.feed(FlushCache(call_id="call", tiers=("device",)))
    return cell


def submit_together(cell: CellModel, *prompts: list[int]) -> RunBatch:
    """Requests that are waiting when the next batch is formed, named by letters in order."""
    cell.submit([900], max_tokens=1, request_id="ahead")  # Its batch is on its way, so the others must wait.
    for name, prompt in zip("abcd", prompts, strict=False):
        cell.submit(prompt, max_tokens=2, request_id=name, ignore_eos=True)
    worker = cell.workers["worker-0"]
    worker.step()
    cell.deliver(worker)
    return orders_of(cell, RunBatch)[-1]


def rot(cell: CellModel, tokens: list[int]) -> None:
    """Spoil the host copies of pages that begin with one of these tokens."""
    assert cell.storages["storage"].pool is not None
    for page in cell.storages["storage"].pool.memory.values():
        page.is_corrupt = page.is_corrupt or page.tokens[0] in tokens


def test_output_that_a_request_brings_back_counts_as_its_prompt(cell: CellModel) -> None:
    """One that was preempted stands on a load with what it has generated, too; one that goes another way does not."""
    (node,) = [node for node in cell.state.tree.nodes.values() if node.tokens == pack_int32(SHARED)]
    draft = BatchBuilder(budget=0, places=0, loading={node.id: ""})
    for name in "abc":
        cell.submit(SHARED[:2], max_tokens=20, request_id=name)
    requests = [cell.state.requests[name] for name in "abc"]
    for request, output in zip(requests, ([], SHARED[2:9], [9] * 9), strict=True):
        request.output = pack_int32(output)

    assert stand_on(cell.state, starts_of_loads(cell.state.tree, draft), requests) == [requests[1]]


def test_one_load_serves_all_that_share_it(cell: CellModel) -> None:
    """Both are admitted to the batch that loads, and the load is ordered once."""
    batch = submit_together(cell, [*SHARED, 7], [*SHARED, 8, 8])

    assert [(chunk.request_id, chunk.start) for chunk in batch.chunks] == [("a", 40), ("b", 40)]
    (load,) = batch.loads
    assert isinstance(load, PageLoad)
    assert load.request_id == "a"
    assert cell.state.counters["bundle_hits"] == 1
    cell.drain()
    assert [order.host_tokens for order in cell.admitted[-2:]] == [40, 40]


def test_a_bundle_hit_does_not_pass_a_more_urgent_request(cell: CellModel) -> None:
    """What stands on the load comes first among its equals, and behind a higher priority."""
    cell.submit([900], max_tokens=1, request_id="ahead")
    for name, prompt, priority in (("a", [*SHARED, 7], 2), ("b", [600] * 9, 1), ("c", [*SHARED, 8], 0)):
        cell.submit(prompt, max_tokens=2, request_id=name, ignore_eos=True, priority=priority)
    worker = cell.workers["worker-0"]
    worker.step()
    cell.deliver(worker)

    assert [chunk.request_id for chunk in orders_of(cell, RunBatch)[-1].chunks] == ["a", "b", "c"]
    cell.drain()


def test_a_part_of_a_load_can_be_shared(cell: CellModel) -> None:
    """One stands on the first pages only, another goes on with a load of its own behind them."""
    batch = submit_together(cell, [*SHARED[:20], 7], [*SHARED, 8], [*SHARED[:12], 9, 9])

    assert [(chunk.request_id, chunk.start) for chunk in batch.chunks] == [("a", 20), ("b", 40), ("c", 12)]
    assert [(load.request_id, len(load.host_pages) // 4) for load in batch.loads] == [("a", 5), ("b", 5)]
    cell.drain()


def test_a_node_that_is_cut_while_it_is_being_loaded_can_be_joined_again(cell: CellModel) -> None:
    """The second and the third stand on the same start of what the first loads."""
    batch = submit_together(cell, [*SHARED, 7], [*SHARED[:12], 8], [*SHARED[:12], 9, 9])

    assert [(chunk.request_id, chunk.start) for chunk in batch.chunks] == [("a", 40), ("b", 12), ("c", 12)]
    assert [load.request_id for load in batch.loads] == ["a"]
    cell.drain()


@pytest.mark.parametrize(
    ("rotten", "restarted"),
    [
        ([36], ["b"]),
        ([24], ["b"]),
        ([16], ["a", "b"]),
        ([0], ["a", "b", "c"]),
        ([0, 36], ["a", "b", "c"]),
    ],
)
def test_a_rotten_page_restarts_those_who_stand_on_it_and_no_others(
    cell: CellModel, rotten: list[int], restarted: list[str]
) -> None:
    """Every answer is right and every page comes back, whichever page of a shared load fails."""
    submit_together(cell, [*SHARED[:20], 7], [*SHARED, 8], [*SHARED[:12], 9, 9])
    rot(cell, rotten)

    cell.drain()

    again = sorted({order.request_id for order in cell.admitted if order.attempt > 1})
    assert again == restarted
    ended = cell.gateways["gateway"].ended
    assert [ended[name] for name in "abc"] == ["finished"] * 3


@pytest.mark.parametrize("gone", ["a", "b", "c"])
@pytest.mark.parametrize("rotten", [[], [8], [36]])
@pytest.mark.parametrize("finishes_first", [False, True])
def test_anybody_may_leave_before_the_load_is_reported(
    cell: CellModel, gone: str, rotten: list[int], finishes_first: bool
) -> None:
    """A cancelled request takes nothing away from those who stand on its load."""
    cell.workers["worker-0"].finishes_before_batch_done = finishes_first
    submit_together(cell, [*SHARED[:20], 7], [*SHARED, 8], [*SHARED[:12], 9, 9])
    rot(cell, rotten)
    cell.cancel(gone)

    cell.drain()

    assert cell.state.requests == {}


@pytest.mark.parametrize("failing", ["a", "b", "c"])
def test_a_chunk_that_fails_spoils_nothing_for_others(cell: CellModel, failing: str) -> None:
    """What others proved to be loaded stays on the device."""
    submit_together(cell, [*SHARED[:20], 7], [*SHARED, 8], [*SHARED[:12], 9, 9])
    cell.workers["worker-0"].fail_next_chunk_of = failing

    cell.drain()

    again = sorted({order.request_id for order in cell.admitted if order.attempt > 1})
    assert again == [failing]


def test_a_worker_lost_under_a_shared_load_leaves_no_lock_behind(cell: CellModel) -> None:
    """The host copies are free to go, and all requests resume."""
    submit_together(cell, [*SHARED[:20], 7], [*SHARED, 8])
    cell.lose_worker("worker-0")

    assert not any(node.host_locks for node in cell.state.tree.nodes.values())
    cell.answer_resume("gateway")
    cell.answer_resume("gateway")
    cell.add_worker("worker-0", pages=60)
    cell.drain()
