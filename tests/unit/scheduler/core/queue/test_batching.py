"""Batches."""

from shared.messages.worker_events import DeviceFacts
from shared.messages.worker_plans import RunBatch
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders_of


def spans(cell: CellModel) -> list[list[tuple[str, int, int]]]:
    """Each batch as (request, start, end) triples."""
    return [
        [(chunk.request_id, chunk.start, chunk.end) for chunk in batch.chunks] for batch in orders_of(cell, RunBatch)
    ]


def test_a_long_prompt_is_computed_in_chunks_and_others_fill_the_rest(make_cell: MakeCell) -> None:
    """Started prompts go on first; new ones take what is left of the budget."""
    cell = make_cell(max_batch_tokens=10, batches_ahead=1)
    cell.submit([1] * 25, request_id="long")
    cell.serve([2] * 12, request_id="short")

    assert spans(cell) == [
        [("long", 0, 10)],
        [("long", 10, 20)],
        [("long", 20, 25), ("short", 0, 5)],
        [("short", 5, 12)],
    ]


def test_a_few_batches_are_sent_ahead(make_cell: MakeCell) -> None:
    """The worker has the next batch before it has answered the last, and no more than that."""
    cell = make_cell(max_batch_tokens=4, batches_ahead=3)

    cell.submit([1] * 40)

    assert len(spans(cell)) == 3
    cell.workers["worker-0"].step()
    cell.deliver(cell.workers["worker-0"])
    assert len(spans(cell)) == 4


def test_no_more_than_max_running_run(make_cell: MakeCell) -> None:
    """The next is admitted when one has finished."""
    cell = make_cell(max_running=2)
    for number in range(5):
        cell.submit([number] * 4, max_tokens=3)
    most = 0
    while cell.round():
        most = max(most, len(cell.state.workers["worker-0"].work.running))

    assert most == 2
    assert len(cell.gateways["gateway"].ended) == 5


def test_bounds_that_are_left_to_devices_are_theirs(make_cell: MakeCell) -> None:
    """As each said when it joined; one that said nothing has the usual ones."""
    cell = make_cell(max_running=0, max_batch_tokens=0, batches_ahead=1)
    cell.serve([1] * 25, max_tokens=1)
    cell.state.workers["worker-0"].device = DeviceFacts(kind="cuda", max_batch_tokens=10, max_running=2)
    for number in range(2, 7):
        cell.submit([number] * 14, max_tokens=3)
    most = 0
    while cell.round():
        most = max(most, len(cell.state.workers["worker-0"].work.running))

    tokens = [sum(end - start for _, start, end in batch) for batch in spans(cell)]
    assert tokens[0] == 25
    assert max(tokens[1:]) == 10
    assert most == 2


def test_a_setting_of_the_cell_wins_over_devices(make_cell: MakeCell) -> None:
    """Whatever they said."""
    cell = make_cell(max_batch_tokens=7, batches_ahead=1)
    cell.state.workers["worker-0"].device = DeviceFacts(kind="cuda", max_batch_tokens=10, max_running=2)
    cell.serve([1] * 25, max_tokens=1)

    assert [sum(end - start for _, start, end in batch) for batch in spans(cell)] == [7, 7, 7, 4]


def test_computed_pages_are_shared_before_their_request_ends(make_cell: MakeCell) -> None:
    """A request that comes while another decodes finds that one's prompt."""
    cell = make_cell(pages=64)
    cell.submit(list(range(20)), max_tokens=30, seed=3)
    for _ in range(2):
        cell.round()
    assert cell.state.requests

    cell.submit([*range(20), 50])

    assert cell.admitted[1].cached_tokens == 20
    cell.drain()


def test_equal_prompts_in_one_batch_keep_their_own_pages(make_cell: MakeCell) -> None:
    """Both compute; the tree keeps one copy and the other's pages return at its end."""
    cell = make_cell(pages=64)
    cell.submit(list(range(20)), max_tokens=4, seed=1)
    cell.serve(list(range(20)), max_tokens=4, seed=2)

    assert [order.cached_tokens for order in cell.admitted] == [0, 0]
    assert cell.state.workers["worker-0"].pool.leased == 0
