"""Deferral on delay hit: who waits for whom, and for how long."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from services.scheduler.core import status
from shared.messages.cell_events import CellConfigured, WorkerLost
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell

DOCUMENT = [position % 10 for position in range(2048)]


def ask(cell: CellModel, number: int, document: list[int] = DOCUMENT, **options: Any) -> str:
    """Submit a question about a document."""
    question = [50 + number] * 12
    return cell.submit([*document, *question], max_tokens=1, request_id=f"q{number}", **options)


def deferred(cell: CellModel) -> list[str]:
    """Ids of deferred requests, in order of submission."""
    return [name for name, request in cell.state.requests.items() if request.wait.is_deferred]


@pytest.fixture
def big(make_cell: MakeCell) -> MakeCell:
    """Build a cell whose worker has room for many long prompts."""

    def make(**options: Any) -> CellModel:
        return make_cell(**{"page_size": 64, "pages": 2048, "lease_tokens": 64, "max_batch_tokens": 8192} | options)

    return make


@pytest.mark.parametrize("schedule", ["balanced", "lpm", "fcfs"])
def test_a_burst_about_a_new_document_computes_it_once(big: MakeCell, schedule: str) -> None:
    """32 requests that differ in their question plan the document's prefill once, under every schedule."""
    cell = big(schedule=schedule)
    for number in range(32):
        ask(cell, number)
    cell.drain()

    counters = cell.state.counters
    assert counters["prefill_tokens_planned"] == 2048 + 32 * 12
    assert cell.workers["worker-0"].prefilled_tokens == 2048 + 32 * 12
    assert counters["hit_tokens_device"] == 31 * 2048
    assert counters["requests_deferred"] == 31
    assert "deferral_deadlines" not in counters


def test_without_deferral_the_document_is_computed_again(big: MakeCell) -> None:
    """The same burst with ``defer_tokens`` 0 recomputes it for whatever was batched before it was known."""
    cell = big(defer_tokens=0)
    for number in range(32):
        ask(cell, number)
    cell.drain()

    assert cell.state.counters["prefill_tokens_planned"] >= 2 * 2048 + 32 * 12
    assert "requests_deferred" not in cell.state.counters


@pytest.mark.parametrize(("shared", "expected"), [(64, []), (128, ["q1"])])
def test_the_threshold_decides(big: MakeCell, shared: int, expected: list[str]) -> None:
    """As many shared tokens as ``defer_tokens`` are recomputed; more are waited for."""
    cell = big()
    ask(cell, 0, DOCUMENT[:shared])
    ask(cell, 1, DOCUMENT[:shared])

    assert deferred(cell) == expected


@pytest.mark.parametrize(("tokens", "expected"), [(128, []), (129, ["q1"])])
def test_the_page_of_the_last_token_is_not_waited_for(big: MakeCell, tokens: int, expected: list[str]) -> None:
    """A prompt's last token is computed in any case, so its page is nothing that another could bring."""
    cell = big()
    for name in ("q0", "q1"):
        cell.submit(DOCUMENT[:tokens], max_tokens=1, request_id=name)

    assert deferred(cell) == expected


def test_nobody_is_deferred_once_deferral_is_off(big: MakeCell) -> None:
    """What was announced before the change is waited for no more."""
    cell = big()
    ask(cell, 0)
    cell.feed(CellConfigured(config=structs.replace(cell.state.config, defer_tokens=0)))
    ask(cell, 1)

    assert deferred(cell) == []


@pytest.mark.parametrize(("budget", "expected"), [(120, []), (100, ["q1"])])
def test_computed_tokens_of_an_unfinished_page_do_not_count(big: MakeCell, budget: int, expected: list[str]) -> None:
    """The page is in no tree yet, but what is left of it is all that a wait would be for."""
    cell = big(defer_tokens=80, max_batch_tokens=budget, batches_ahead=10)
    ask(cell, 0, DOCUMENT[:640])
    worker = cell.workers["worker-0"]
    worker.step()
    cell.deliver(worker)

    ask(cell, 1, DOCUMENT[:192])

    assert cell.state.requests["q0"].computed == budget
    assert deferred(cell) == expected


def test_what_is_cached_already_does_not_count(big: MakeCell) -> None:
    """Only tokens beyond the own cached prefix are worth a wait."""
    cell = big()
    cell.serve(DOCUMENT, max_tokens=1)
    ask(cell, 0, [*DOCUMENT, *[70] * 64])
    ask(cell, 1, [*DOCUMENT, *[70] * 64])

    assert deferred(cell) == []


def test_a_waiter_goes_as_soon_as_the_shared_part_is_computed(big: MakeCell) -> None:
    """It does not wait for the rest of a long producer, chunk by chunk being fine enough."""
    cell = big(max_batch_tokens=1536, batches_ahead=3)
    ask(cell, 0)
    ask(cell, 1, DOCUMENT[:640])
    assert deferred(cell) == ["q1"]

    worker = cell.workers["worker-0"]
    worker.step()
    cell.deliver(worker)

    assert cell.state.requests["q0"].computed == 1536
    assert deferred(cell) == []
    assert cell.admitted[1].device_tokens == 640
    cell.drain()


def test_a_waiter_stands_at_the_front_again(big: MakeCell) -> None:
    """It goes before what arrived in the meantime, and before what it let pass."""
    cell = big(max_batch_tokens=2048, batches_ahead=1)
    for number in range(3):
        ask(cell, number)
    for name in ("x", "y"):
        cell.submit([80 if name == "x" else 90] * 1500, max_tokens=1, request_id=name)
    cell.drain()

    order = [admitted.request_id for admitted in cell.admitted]
    assert order.index("q1") < order.index("y")
    assert order.index("q2") < order.index("y")


def test_the_deadline_runs_from_the_first_deferral_and_ends_the_wait(big: MakeCell) -> None:
    """A request whose producer takes too long runs anyway, and is not deferred again."""
    cell = big(defer_deadline_ms=500)
    ask(cell, 0)
    ask(cell, 1)
    (timer,) = cell.timers
    assert cell.timers[timer] == cell.time_ns + 500 * 1_000_000

    cell.fire(timer)

    assert deferred(cell) == []
    assert cell.state.counters["deferral_deadlines"] == 1
    assert cell.state.counters["deferral_ms"] >= 500
    assert [admitted.request_id for admitted in cell.admitted] == ["q0", "q1"]
    cell.drain()
    assert cell.timers == {}


def end_by_cancelling(cell: CellModel) -> None:
    cell.cancel("q0")


def end_by_losing_the_worker(cell: CellModel) -> None:
    worker = cell.workers.pop("worker-0")
    cell.feed(WorkerLost(worker_id="worker-0", incarnation=worker.incarnation))


def end_by_a_failed_chunk(cell: CellModel) -> None:
    worker = cell.workers["worker-0"]
    worker.fail_next_chunk_of = "q0"
    worker.step()
    cell.deliver(worker)


@pytest.mark.parametrize("end", [end_by_cancelling, end_by_losing_the_worker, end_by_a_failed_chunk])
def test_a_producer_that_brings_nothing_is_waited_for_no_longer(big: MakeCell, end: Callable[..., None]) -> None:
    """Its waiters run, one of them as the new producer of the others."""
    cell = big()
    for number in range(4):
        ask(cell, number)
    assert len(deferred(cell)) == 3

    end(cell)

    assert "q0" not in cell.state.waiters
    if not cell.workers:
        cell.add_worker("worker-0", pages=2048)
    assert len(deferred(cell)) == 2
    cell.drain()
    assert len([name for name, how in cell.gateways["gateway"].ended.items() if how == "finished"]) >= 3


def test_a_waiting_request_produces_for_those_behind_it(big: MakeCell) -> None:
    """Marks in the queue: what was looked at and not admitted is waited for by those behind that share it."""
    cell = big(pages=40, schedule="lpm")  # One of these prompts leaves no room for another.
    cell.submit([90] * 2000, max_tokens=20, request_id="running", ignore_eos=True)
    ask(cell, 0)
    ask(cell, 1)
    ask(cell, 2)

    nodes = status(cell.state, "x")
    assert (nodes.in_flight_nodes, nodes.in_queue_nodes, nodes.deferred) == (1, 1, 2)
    cell.drain()
    assert cell.state.counters["prefill_tokens_planned"] == 2000 + 2048 + 3 * 12


def test_nobody_waits_for_one_that_stands_behind(big: MakeCell) -> None:
    """A request of higher priority computes what waiting ones have marked; they then wait for it, and not in a row."""
    cell = big(pages=40, schedule="lpm")
    cell.submit([90] * 2000, max_tokens=20, request_id="running", ignore_eos=True)
    ask(cell, 0)
    ask(cell, 1)
    assert cell.state.requests["q0"].place.marks
    assert cell.state.requests["q1"].wait.producer == "q0"

    ask(cell, 2, priority=1)
    cell.submit([80] * 8, request_id="last")

    assert not cell.state.requests["q2"].wait.is_deferred
    assert [cell.state.requests[name].wait.producer for name in ("q0", "q1")] == ["q2", "q2"]
    cell.drain()
    assert [admitted.request_id for admitted in cell.admitted][:2] == ["running", "q2"]
    assert cell.state.counters["prefill_tokens_planned"] == 2000 + 2048 + 3 * 12 + 8


@pytest.mark.parametrize("hints", [{"read": False}, {"prompt_logprobs": 1}])
def test_who_may_not_read_waits_for_nobody(big: MakeCell, hints: dict[str, Any]) -> None:
    """It could not use what it waited for."""
    cell = big()
    ask(cell, 0)
    ask(cell, 1, **hints)

    assert deferred(cell) == []


def test_nobody_waits_for_what_is_not_written(big: MakeCell) -> None:
    """A producer that may not cache brings nothing."""
    cell = big()
    ask(cell, 0, write=False)
    ask(cell, 1)

    assert deferred(cell) == []


def test_tenants_do_not_wait_for_one_another(big: MakeCell) -> None:
    """Another namespace shares no token."""
    cell = big()
    ask(cell, 0, salt="a")
    ask(cell, 1, salt="b")

    assert deferred(cell) == []
