"""Which candidates a batch takes, and in which order."""

import random
from typing import Any

import pytest

from services.scheduler.core import new_state
from services.scheduler.core.queue.batch_builder import BatchBuilder, is_loading_bound
from services.scheduler.core.queue.schedules import SCHEDULES, Schedule, register_schedule
from services.scheduler.core.state import CellState, Worker
from services.scheduler.policies.balanced import Balanced
from shared.messages.cell_events import CellConfig, FlushCache
from shared.messages.worker_plans import RunBatch
from tests.cases import case
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders, orders_of
from tests.unit.scheduler.core.queue.forming import candidate, form


@pytest.fixture
def state() -> CellState:
    """A state whose ratio is 10 loaded tokens per computed token."""
    state = new_state()
    state.config = CellConfig(load_compute_ratio=10.0)
    return state


def test_a_name_has_one_schedule() -> None:
    """Another of the same name is refused, and the first stays; registering that one again changes nothing."""

    class Another(Schedule):
        name = "balanced"

    with pytest.raises(ValueError, match=r"schedules Balanced and .*Another are 'balanced'"):
        register_schedule(Another)

    assert register_schedule(Balanced) is Balanced
    assert type(SCHEDULES["balanced"]) is Balanced


def test_balanced_takes_the_head_and_puts_aside_what_lengthens_the_wait(state: CellState) -> None:
    """Computation is taken before more loads; those fill up what is left, in their order."""
    waiting = [
        candidate("head", 1000, 10),
        candidate("load-1", 500, 1),
        candidate("compute-1", 0, 40),
        candidate("load-2", 400, 1),
        candidate("compute-2", 0, 40),
    ]

    assert form(state, Balanced(), waiting) == ["head", "compute-1", "compute-2", "load-1", "load-2"]


def test_balanced_takes_a_load_that_computation_hides(state: CellState) -> None:
    """Enough was taken that computes for long: the next load keeps nobody waiting."""
    waiting = [candidate("compute", 0, 100), candidate("load", 900, 5), candidate("last", 0, 1)]

    assert form(state, Balanced(), waiting) == ["compute", "load", "last"]


def test_what_was_put_aside_waits_for_a_later_batch_when_this_one_is_full(state: CellState) -> None:
    """A full batch ends the formation."""
    waiting = [candidate("head", 1000, 10), candidate("load", 500, 1), candidate("compute", 0, 40)]

    assert form(state, Balanced(), waiting, places=2) == ["head", "compute"]


def test_a_batch_is_loading_bound_by_the_aggregated_ratio(state: CellState) -> None:
    """Loads above ten tokens per computed token are waited for."""
    nothing: Any = None  # No decision here looks into a pool.
    worker = Worker("w", "1", "n", nothing, 1, nothing)
    draft = BatchBuilder(100, 100, loaded=100, computed=10)

    assert not is_loading_bound(state, worker, draft)
    assert is_loading_bound(state, worker, draft, load=1)
    assert not is_loading_bound(state, worker, draft, load=10, compute=1)
    assert not is_loading_bound(state, worker, BatchBuilder(100, 100))


def test_nobody_starves_under_balanced(state: CellState) -> None:
    """Whatever keeps coming behind it, a request is taken at the latest when everybody before it was a head."""
    for seed in range(50):
        with case(seed=seed):
            _nobody_starves(state, random.Random(seed))


def _nobody_starves(state: CellState, chance: random.Random) -> None:
    queue: list[Any] = []
    due: dict[Any, Any] = {}
    for number in range(300):
        for _ in range(chance.randrange(3)):
            name = f"r{number}-{len(due)}"
            # Whoever computes comes again and again, so that loads are put aside for as long as possible.
            load, compute = (chance.randrange(200, 2000), 1) if chance.random() < 0.4 else (0, chance.randrange(1, 9))
            due[name] = number + len(queue) + 1
            queue.append(candidate(name, load, compute))
        taken = form(state, Balanced(), queue, budget=chance.randrange(1, 40), places=chance.randrange(1, 4))
        assert not queue or taken[0] == queue[0].request.request_id
        queue = [item for item in queue if item.request.request_id not in taken]
        assert all(due[item.request.request_id] > number for item in queue)


@pytest.mark.parametrize(
    ("is_filling", "ratio", "expected"), [(True, 2.0, True), (False, 2.0, False), (True, 50.0, False)]
)
def test_a_loading_bound_batch_is_filled_with_decode_steps(
    make_cell: MakeCell, is_filling: bool, ratio: float, expected: bool
) -> None:
    """Only where that is configured, and only when the batch waits for its loads."""
    cell = make_cell(pages=20, host_pages=60, bubble_filling=is_filling, load_compute_ratio=ratio)
    cell.serve(list(range(40)), max_tokens=1)
    for number in range(4):
        cell.serve([500 + number] * 40, max_tokens=1)
    cell.feed(FlushCache(call_id="call", tiers=("device",)))

    cell.submit([*range(40), 7], max_tokens=1)

    (batch,) = orders(cell.outputs[-1], RunBatch)
    assert batch.loads
    assert batch.fill_bubble is expected
    assert cell.state.counters["batches_loading_bound"] == (ratio == 2.0)
    cell.drain()


@pytest.mark.parametrize("is_prefilling", [True, False])
def test_what_needs_no_load_goes_behind_a_loading_bound_batch(make_cell: MakeCell, is_prefilling: bool) -> None:
    """With prefill in bubbles it is a batch of its own, which the worker computes while the other one loads."""
    cell = _with_a_copy_in_host_memory(make_cell, bubble_prefill=is_prefilling)
    cell.submit([900] * 9, max_tokens=1)  # Keeps the worker busy until both wait.
    cell.submit([*range(40), 7], max_tokens=1)
    cell.serve([700, 701, 702], max_tokens=1)

    batches = orders_of(cell, RunBatch)[-2:]
    chunks = [[(chunk.start, chunk.end) for chunk in order.chunks] for order in batches]
    if is_prefilling:
        assert chunks == [[(40, 41)], [(0, 3)]]
        assert [(order.fill_bubble, order.bubble_prefill) for order in batches] == [(True, True), (False, False)]
    else:
        assert chunks[1] == [(40, 41), (0, 3)]
        assert not batches[1].bubble_prefill
    assert cell.state.counters.get("batches_split", 0) == is_prefilling
    assert cell.state.counters.get("batches_in_bubbles", 0) == is_prefilling


def _with_a_copy_in_host_memory(make_cell: MakeCell, **settings: Any) -> CellModel:
    """Of ``range(40)``; with two batches outstanding at once none of the others forms before both have waited."""
    cell = make_cell(pages=30, host_pages=60, load_compute_ratio=2.0, batches_ahead=1, **settings)
    cell.serve(list(range(40)), max_tokens=1)
    for number in range(6):
        cell.serve([500 + number] * 40, max_tokens=1)
    cell.feed(FlushCache(call_id="call", tiers=("device",)))
    return cell
