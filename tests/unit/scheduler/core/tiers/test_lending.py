"""What is read from another node's host memory, when, and what stays locked there meanwhile."""

import pytest

from services.scheduler.core.restoring.exploration import TRIED_EVERY
from shared.messages.base import unpack_int32
from shared.messages.cell_events import FlushCache
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell
from tests.unit.scheduler.core.fetching import CHUNK, PAGE, prompt
from tests.unit.scheduler.core.sharing_nodes import KEY, A, B, fetches, two_nodes


@pytest.fixture
def make_nodes(make_cell: MakeCell) -> MakeCell:
    """Two nodes; the first has computed a prompt of three chunks and has it in host memory, and its worker is gone."""

    def make(**settings: object) -> CellModel:
        cell = two_nodes(make_cell, **settings)  # type: ignore[arg-type]
        cell.lose_worker("worker-a")
        return cell

    return make


def test_the_order_names_the_lenders_pages(make_nodes: MakeCell) -> None:
    """One for each page of the run, and the fetch brings the whole of it."""
    cell = make_nodes()
    cell.submit(prompt(3))

    (order,) = fetches(cell)
    assert order.lender is not None
    assert (order.lender.storage_id, order.lender.incarnation) == (A, cell.storages[A].incarnation)
    lent = cell.storages[A].pool
    assert lent is not None
    memory = lent.memory
    pages = unpack_int32(order.lender.pages)
    assert [memory[page].identity() for page in pages] == [
        order.identities[index * 16 : index * 16 + 16] for index in range(len(pages))
    ]
    cell.drain()
    assert cell.state.counters["fetched_tokens_lent"] == 3 * CHUNK
    assert cell.admitted[-1].lent_tokens == 3 * CHUNK


def test_what_is_lent_stays_until_the_fetch_is_over(make_nodes: MakeCell) -> None:
    """A flush of host memory leaves the lender's copies, and the next one does not."""
    cell = make_nodes()
    cell.submit(prompt(3))

    cell.feed(FlushCache(call_id="one", tiers=("host",)))
    pool = cell.state.storages[A].pool
    assert pool is not None
    assert pool.cached == 6
    cell.drain()
    cell.feed(FlushCache(call_id="two", tiers=("host",)))
    cell.drain()
    assert pool.cached == 0


@pytest.mark.parametrize("shares", [("", "engine"), ("engine", ""), ("engine", "another")])
def test_both_must_share_by_one_engine(make_nodes: MakeCell, shares: tuple[str, str]) -> None:
    """Otherwise nothing is ordered, and the prompt is computed."""
    cell = make_nodes(shares=shares)
    cell.serve(prompt(3))

    assert fetches(cell) == []


def test_kv_of_a_caller_with_a_key_is_not_lent(make_nodes: MakeCell) -> None:
    """The way between nodes is not encrypted."""
    cell = make_nodes(key_id=KEY)
    cell.serve(prompt(3), key_id=KEY)

    assert fetches(cell) == []


def test_a_run_goes_on_from_the_middle_of_a_chunk(make_nodes: MakeCell) -> None:
    """Pages that the worker has are named in neither list."""
    cell = make_nodes()
    cell.serve(prompt(3)[: PAGE + 1], max_tokens=1)
    cell.submit(prompt(3))

    order = fetches(cell)[-1]
    assert order.lender is not None
    assert [page >= 0 for page in unpack_int32(order.host_pages)] == [False, True, True, True, True, True]
    assert [page >= 0 for page in unpack_int32(order.lender.pages)] == [False, True, True, True, True, True]
    cell.drain()


def test_a_lender_that_fails_is_not_asked_again(make_nodes: MakeCell) -> None:
    """The request computes what did not come."""
    cell = make_nodes()
    cell.submit(prompt(3))
    cell.storages[B].step()
    cell.storages[B].fetch(error="made to fail")
    cell.drain()

    assert len(fetches(cell)) == 1


def test_a_lost_lender_locks_nothing(make_nodes: MakeCell) -> None:
    """Its copies went with it; the fetch ends when the borrower says so."""
    cell = make_nodes()
    cell.submit(prompt(3))
    cell.lose_storage(A)
    cell.drain()

    assert cell.state.counters["fetches_failed"] == 1


def test_computing_is_preferred_where_the_network_is_slower(make_nodes: MakeCell) -> None:
    """As measured by what came before: a byte took a second."""
    cell = make_nodes()
    cell.state.storages[B].fetching.lender_rate.note(1.0, 1e6)
    cell.state.speed.note_compute(64, 0, 6400)
    cell.serve(prompt(3))

    assert fetches(cell) == []


def test_a_network_that_was_slow_is_tried_again(make_nodes: MakeCell) -> None:
    """A link that was cut and mended: without a loan nothing would be observed of it again."""
    cell = make_nodes()
    fetching = cell.state.storages[B].fetching
    fetching.lender_rate.note(1.0, 1e6)
    cell.state.speed.note_compute(64, 0, 6400)
    fetching.declined_loans = TRIED_EVERY - 1
    cell.serve(prompt(3))

    assert fetches(cell) == []
    assert (fetching.declined_loans, fetching.lender_rate.observations) == (0, 0)
