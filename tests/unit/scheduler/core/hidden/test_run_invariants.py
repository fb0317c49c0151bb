"""The checker of runs finds what it is for."""

from collections.abc import Callable

import pytest

from services.scheduler.core import check_invariants
from services.scheduler.core.hidden.hidden_in_flight import HiddenFetch, HiddenRun
from services.scheduler.core.lifecycle import RequestState
from services.scheduler.core.queue.completion import end_early
from services.scheduler.core.queue.leases import preempt
from services.scheduler.core.request import Request
from services.scheduler.core.state import CellState, Worker
from services.scheduler.core.step import Step
from shared.chunks import chunk_pages
from shared.errors import InvariantViolated
from tests.present import present
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell, worker_goes_on
from tests.unit.scheduler.core.fetching import PAGE, prompt
from tests.unit.scheduler.core.restoring_cells import bring, bring_at_once, put_hidden, restoring_cell


@pytest.fixture
def cell(make_cell: MakeCell) -> CellModel:
    """A cell in which one request is restored from what has arrived, and another waits for its first part."""
    cell = restoring_cell(make_cell)
    for kind in (1, 2):
        put_hidden(cell, prompt(3, kind=kind))
    cell.submit(prompt(3, kind=1), request_id="running")
    bring(cell, 1)
    cell.submit(prompt(3, kind=2), request_id="waiting")
    assert cell.state.requests["running"].hidden.run is not None
    assert cell.state.requests["running"].hidden.run.arrived > 0
    assert cell.state.requests["waiting"].wait.fetch
    check_invariants(cell.state)
    return cell


def run_of(state: CellState, name: str = "waiting") -> HiddenRun:
    return present(state.requests[name].hidden.run)


def fetch_of(state: CellState, name: str = "waiting") -> HiddenFetch:
    return state.hidden_fetches[run_of(state, name).fetch]


def free_a_page(state: CellState) -> None:
    assert state.storages["storage"].hidden.pool is not None
    state.storages["storage"].hidden.pool.release(run_of(state).pages[:4])


def lose_the_pool(state: CellState) -> None:
    state.storages["storage"].hidden.pool = None


def lose_a_page(state: CellState) -> None:
    run_of(state).pages = run_of(state).pages[4:]


def mistake_the_tokens(state: CellState) -> None:
    run_of(state).identities = bytes(len(run_of(state).identities))


def lose_the_fetch(state: CellState) -> None:
    del state.hidden_fetches[run_of(state).fetch]


def end_the_fetch(state: CellState) -> None:
    run_of(state).fetch = 0


def forget_the_owner(state: CellState) -> None:
    fetch_of(state).request_id = ""


def forget_the_deadline(state: CellState) -> None:
    del state.timers[fetch_of(state).timer_id]


def cancel_quietly(state: CellState) -> None:
    fetch_of(state).call_off()


def restore_too_early(state: CellState) -> None:
    state.requests["running"].planned = run_of(state, "running").end


def free_too_early(state: CellState) -> None:
    run_of(state, "running").depth = run_of(state, "running").arrived


def be_late(state: CellState) -> None:
    fetch_of(state).expire()


def count_on_an_answer(state: CellState) -> None:
    run_of(state).further = "asked"
    run_of(state).goal = run_of(state).end - 1


@pytest.mark.parametrize(
    "break_it",
    [
        free_a_page,
        lose_the_pool,
        lose_a_page,
        mistake_the_tokens,
        lose_the_fetch,
        end_the_fetch,
        forget_the_owner,
        forget_the_deadline,
        cancel_quietly,
        restore_too_early,
        free_too_early,
        be_late,
        count_on_an_answer,
    ],
)
def test_a_broken_state_is_recognised(cell: CellModel, break_it: Callable[..., None]) -> None:
    """Each of these is a fault that the core must never make."""
    break_it(cell.state)

    with pytest.raises(InvariantViolated):
        check_invariants(cell.state)


def abort(turn: Step, worker: Worker, request: Request) -> None:
    end_early(turn, request, "cancelled")


@pytest.mark.parametrize("stop", [abort, preempt])
def test_a_run_of_a_request_that_is_being_stopped_need_not_go_on(
    make_cell: MakeCell, stop: Callable[..., None]
) -> None:
    """All that has come is restored and nothing more is fetched: its worker is about to let go of it."""
    cell = restoring_cell(make_cell, hidden_pages=4 * chunk_pages(PAGE))
    put_hidden(cell, prompt(6))
    request = cell.state.requests[cell.submit(prompt(6))]
    bring_at_once(cell, 2)
    assert request.hidden.run is not None
    assert request.planned == request.hidden.run.end < request.hidden.run.goal

    stop(Step(cell.state, cell.seq, cell.time_ns), cell.state.workers["worker-0"], request)
    worker_goes_on(cell)  # What it did before it hears of that.

    assert request.computed == request.hidden.run.end < request.hidden.run.goal
    assert not request.hidden.run.fetch
    check_invariants(cell.state)
    request.state = RequestState.PREFILLING
    with pytest.raises(InvariantViolated, match="that are not fetched"):
        check_invariants(cell.state)
