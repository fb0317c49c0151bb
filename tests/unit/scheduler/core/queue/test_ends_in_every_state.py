"""A client that goes away, a deadline that passes, a gateway that dies: in every state, and nothing is left behind."""

from collections.abc import Callable

import pytest

from services.scheduler.core import status
from services.scheduler.core.request import Request
from shared.messages.cell_events import FlushCache, GatewayLost
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell, timer_of
from tests.unit.scheduler.core.fetching import PAGE, prompt, put_on_disk

NAME = "it"


def ask(cell: CellModel, tokens: list[int], *, max_tokens: int = 20) -> None:
    """The request that is about to end."""
    cell.submit(tokens, request_id=NAME, gateway_id="its", max_tokens=max_tokens, deadline_ms=1_000, ignore_eos=True)


def request(cell: CellModel) -> Request:
    return cell.state.requests[NAME]


def unplaced(make_cell: MakeCell) -> CellModel:
    """No worker takes requests."""
    cell = make_cell(workers=0)
    ask(cell, [1, 2, 3])
    return cell


def waiting(make_cell: MakeCell) -> CellModel:
    """Another has the only place."""
    cell = make_cell(max_running=1)
    cell.submit([9] * 4, max_tokens=30, ignore_eos=True)
    ask(cell, [1, 2, 3])
    assert request(cell).state.value == "waiting"
    return cell


def deferred(make_cell: MakeCell) -> CellModel:
    """Another is about to compute its prefix."""
    cell = make_cell(pages=64, defer_tokens=4)
    cell.submit([*range(60), 1], max_tokens=2)
    ask(cell, [*range(60), 2])
    assert request(cell).wait.is_deferred
    return cell


def prefetching(make_cell: MakeCell) -> CellModel:
    """A storage brings its prefix from the disk."""
    cell = make_cell(page_size=PAGE, pages=40, host_pages=40, disk_chunks=40)
    put_on_disk(cell, prompt(3))
    ask(cell, prompt(3))
    assert request(cell).wait.fetch
    return cell


def loading(make_cell: MakeCell) -> CellModel:
    """Its batch loads its prefix from host memory."""
    cell = make_cell(pages=40, host_pages=60, host_writes="through")
    cell.serve(list(range(40)), max_tokens=1)
    cell.feed(FlushCache(call_id="call", tiers=("device",)))
    ask(cell, [*range(40), 7])
    assert cell.state.workers["worker-0"].work.batches[0].loads
    return cell


def prefilling(make_cell: MakeCell) -> CellModel:
    """A part of its prompt is computed."""
    cell = make_cell(max_batch_tokens=4, batches_ahead=1)
    ask(cell, [1] * 12)
    cell.workers["worker-0"].step()
    cell.deliver(cell.workers["worker-0"])
    assert request(cell).state.value == "prefilling"
    assert 0 < request(cell).computed < 12
    return cell


def decoding(make_cell: MakeCell) -> CellModel:
    """Its answer has begun."""
    cell = make_cell()
    ask(cell, [1, 2, 3])
    cell.round()
    cell.round()
    assert request(cell).state.value == "decoding"
    return cell


def resuming(make_cell: MakeCell) -> CellModel:
    """Its worker died, and its gateway was asked for what it has."""
    cell = make_cell(workers=2)
    ask(cell, [1, 2, 3])
    cell.round()
    cell.lose_worker(request(cell).worker_id)
    assert request(cell).state.value == "resuming"
    return cell


def moving(make_cell: MakeCell) -> CellModel:
    """Its worker drains, and was told to stop it so that it starts again elsewhere."""
    cell = make_cell(workers=2)
    ask(cell, [1, 2, 3])
    cell.round()
    worker = cell.workers[request(cell).worker_id]
    worker.drain(1_000)
    while cell.deliver(worker):
        pass
    cell.fire(timer_of(cell, "drain."))
    assert request(cell).state.value == "preempting"
    return cell


STATES = (unplaced, waiting, deferred, prefetching, loading, prefilling, decoding, resuming, moving)


def cancel(cell: CellModel) -> None:
    cell.cancel(NAME)


def let_deadline_pass(cell: CellModel) -> None:
    cell.fire(request(cell).deadline_timer)


def lose_gateway(cell: CellModel) -> None:
    cell.feed(GatewayLost(gateway_id="its"))


@pytest.mark.parametrize("end", [cancel, let_deadline_pass, lose_gateway])
@pytest.mark.parametrize("reach_state", STATES, ids=lambda state: state.__name__)
def test_a_request_ends_in_every_state_and_frees_all_that_it_had(
    make_cell: MakeCell, reach_state: MakeCell, end: Callable[..., None]
) -> None:
    """It is over once, its timers are gone, nothing is computed for it any more, and no page stays leased or locked."""
    cell = reach_state(make_cell)

    end(cell)
    if not cell.workers:
        cell.add_worker("late")
    cell.drain()  # Checks that nothing is leased.

    assert not cell.state.requests
    assert not cell.state.fetches
    assert not cell.timers
    assert cell.gateways["its"].ended[NAME] in ("cancelled", "deadline_exceeded", "finished")
    assert len(cell.gateways["its"].tokens[NAME]) < 20
    assert all(worker.pool.locked == 0 for worker in cell.state.workers.values())
    assert status(cell.state, "s").queued == 0
    cell.feed(FlushCache(call_id="last"))
    assert all(pool.free == pool.total for pool in status(cell.state, "s").pools)


@pytest.mark.parametrize("reach_state", STATES, ids=lambda state: state.__name__)
def test_ending_twice_is_ending_once(make_cell: MakeCell, reach_state: MakeCell) -> None:
    """The client goes away, and then its deadline passes or its gateway dies."""
    cell = reach_state(make_cell)

    cancel(cell)
    lose_gateway(cell)
    if NAME in cell.state.requests and request(cell).deadline_timer in cell.timers:
        let_deadline_pass(cell)
    if not cell.workers:
        cell.add_worker("late")
    cell.drain()

    assert not cell.state.requests
    ends = [name for name in cell.state.counters if name.startswith(("failed_", "finished_"))]
    assert sum(cell.state.counters[name] for name in ends if name.endswith(("cancelled", "deadline"))) == 1
