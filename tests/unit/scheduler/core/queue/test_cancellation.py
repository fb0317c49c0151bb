"""Ends that come from outside."""

import pytest

from shared.messages.cell_events import GatewayLost
from shared.messages.requests import CancelRequest
from shared.messages.worker_plans import AbortRequest
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders


def test_a_waiting_request_is_dropped(make_cell: MakeCell) -> None:
    """No worker hears of it."""
    cell = make_cell(workers=0)
    name = cell.submit([1, 2, 3])
    cell.cancel(name)

    assert cell.gateways["gateway"].ended == {name: "cancelled"}
    assert cell.state.queued == cell.state.queued_tokens == 0


def test_a_running_request_keeps_its_pages_until_the_worker_answers(make_cell: MakeCell) -> None:
    """Abort first, free later."""
    cell = make_cell()
    name = cell.submit([1, 2, 3], max_tokens=20, ignore_eos=True)
    cell.cancel(name)

    (abort,) = orders(cell.outputs[-1], AbortRequest)
    assert (abort.request_id, abort.reason) == (name, "cancelled")
    assert cell.state.workers["worker-0"].pool.leased > 0
    cell.cancel(name)
    assert orders(cell.outputs[-1], AbortRequest) == []
    cell.drain()
    assert cell.state.workers["worker-0"].pool.leased == 0


def test_only_its_own_gateway_cancels_a_request(make_cell: MakeCell) -> None:
    """Another gateway's word is stale."""
    cell = make_cell()
    name = cell.submit([1, 2, 3])

    assert cell.feed(CancelRequest(request_id=name, gateway_id="stranger")) == []
    assert name in cell.state.requests


@pytest.mark.parametrize(("is_running", "code"), [(False, "deadline_exceeded"), (True, "finished")])
def test_a_deadline_ends_a_request_wherever_it_is(make_cell: MakeCell, is_running: bool, code: str) -> None:
    """In the queue it fails; at a worker it is aborted with reason deadline."""
    cell = make_cell(workers=1 if is_running else 0)
    name = cell.submit([1, 2, 3], max_tokens=20, deadline_ms=50, ignore_eos=True)
    (timer,) = cell.timers
    assert cell.timers[timer] == cell.time_ns + 50_000_000

    cell.fire(timer)
    reasons = [order.reason for order in orders(cell.outputs[-1], AbortRequest)]
    cell.drain()

    assert reasons == (["deadline"] if is_running else [])
    assert cell.gateways["gateway"].ended == {name: code}


def test_a_lost_gateways_requests_are_all_cancelled(make_cell: MakeCell) -> None:
    """Waiting and running ones; others go on."""
    cell = make_cell(max_running=2)
    for number, gateway in enumerate(("dead", "alive", "dead", "alive")):
        cell.submit([number] * 4, max_tokens=6, gateway_id=gateway, ignore_eos=True)

    cell.feed(GatewayLost(gateway_id="dead"))
    cell.drain()

    assert list(cell.gateways["alive"].ended.values()) == ["finished", "finished"]
    assert cell.state.counters["finished_cancelled"] == cell.state.counters["failed_cancelled"] == 1


def test_a_request_that_is_cancelled_while_it_yields_does_not_start_again(make_cell: MakeCell) -> None:
    """It ends when the worker has let go of it."""
    cell = make_cell(max_batch_tokens=4)
    name = cell.submit([1] * 12)
    cell.workers["worker-0"].fail_next_chunk_of = name
    cell.workers["worker-0"].step()
    cell.deliver(cell.workers["worker-0"])
    assert cell.state.requests[name].state.value == "preempting"

    cell.cancel(name)
    cell.drain()

    assert cell.gateways["gateway"].ended == {name: "cancelled"}
    assert len(cell.admitted) == 1
