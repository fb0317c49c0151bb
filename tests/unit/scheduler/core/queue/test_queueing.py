"""Acceptance and order of waiting requests."""

from typing import Any

import pytest

from shared.messages.gateway_notices import GatewayNotice, RequestFailed
from shared.messages.requests import SamplingParams, SubmitRequest
from tests.stateful.cell_model import namespace
from tests.unit.scheduler.core.cell_fixtures import MakeCell, orders


def test_a_full_queue_refuses_with_a_time_to_retry(make_cell: MakeCell) -> None:
    """One more than ``max_queued`` gets queue_full; the others stay."""
    cell = make_cell(max_queued=2, workers=0)
    for _ in range(3):
        cell.submit([1, 2, 3])

    (refusal,) = orders(cell.outputs[-1], RequestFailed)
    assert refusal.code == "queue_full"
    assert refusal.retry_after_ms > 0
    assert cell.state.queued == 2


def test_queued_tokens_are_bounded(make_cell: MakeCell) -> None:
    """Few long prompts fill the queue as well as many short ones."""
    cell = make_cell(max_queued_tokens=10, workers=0)
    cell.submit([1] * 8)
    refused = cell.submit([1] * 3)

    assert cell.gateways["gateway"].ended == {refused: "queue_full"}


def test_requests_are_served_by_priority_then_arrival(make_cell: MakeCell) -> None:
    """A higher priority goes first; equals keep their order."""
    cell = make_cell(workers=0, max_running=1)
    for name, priority in (("a", 0), ("b", 0), ("c", 5), ("d", 5)):
        cell.submit([1, 2, 3], request_id=name, priority=priority)

    cell.add_worker("worker-0")
    cell.drain()

    assert [admitted.request_id for admitted in cell.admitted] == ["c", "d", "a", "b"]


def test_a_repeated_request_does_not_end_the_original(make_cell: MakeCell) -> None:
    """The same gateway repeating itself is ignored; another gateway with that id is told."""
    cell = make_cell()
    cell.submit([1, 2, 3], request_id="a", gateway_id="one")

    same = cell.feed(cell.submitted["a"])
    other = cell.feed(SubmitRequest(**{**fields(cell.submitted["a"]), "gateway_id": "two"}))

    assert same == []
    (refusal,) = orders(other, RequestFailed)
    assert isinstance(other[0], GatewayNotice)
    assert (refusal.code, other[0].gateway_id) == ("duplicate_request", "two")
    cell.drain()
    assert cell.gateways["one"].ended == {"a": "finished"}


def fields(message: SubmitRequest) -> dict[str, Any]:
    """A message's fields by name."""
    return {name: getattr(message, name) for name in message.__struct_fields__}


@pytest.mark.parametrize(
    "change",
    [{"prompt": b""}, {"prompt": b"abc"}, {"namespace": "secret"}, {"sampling": SamplingParams(max_tokens=0)}],
)
def test_what_is_no_request_is_refused(make_cell: MakeCell, change: dict[str, Any]) -> None:
    """A senseless message is answered, not raised about."""
    cell = make_cell()
    good: dict[str, Any] = {
        "request_id": "a",
        "gateway_id": "gateway",
        "namespace": namespace(),
        "prompt": b"\0\0\0\0",
        "sampling": SamplingParams(max_tokens=1),
    }

    (refusal,) = orders(cell.feed(SubmitRequest(**{**good, **change})), RequestFailed)

    assert refusal.code == "invalid_request"
    assert cell.state.requests == {}


def test_what_can_never_fit_is_refused_when_a_worker_is_known(make_cell: MakeCell) -> None:
    """Context and pool of every worker are too small: the caller hears it at once, or when a worker joins."""
    cell = make_cell(pages=4)
    cell.submit([1] * 15, max_tokens=2, request_id="too-long")
    cell.serve([1] * 15, max_tokens=1, request_id="fits")

    assert cell.gateways["gateway"].ended == {"too-long": "context_length_exceeded", "fits": "finished"}

    waiting = make_cell(workers=0)
    waiting.submit([1] * 15, max_tokens=2)
    assert waiting.state.queued == 1
    waiting.add_worker("worker-0", pages=4)
    assert list(waiting.gateways["gateway"].ended.values()) == ["context_length_exceeded"]


def test_an_id_that_comes_again_counts_its_attempts_on(make_cell: MakeCell) -> None:
    """Late events of the first life of an id cannot be taken for the second."""
    cell = make_cell()
    cell.serve([1, 2, 3], request_id="a")

    cell.feed(cell.submitted["a"])

    assert cell.state.requests["a"].attempt == 2


@pytest.mark.parametrize(
    ("bounds", "named"),
    [
        ({"max_queued": 2}, "max_queued"),
        ({"max_queued_tokens": 7}, "max_queued_tokens"),
        ({"max_queued_per_tenant": 2}, "max_queued_per_tenant"),
    ],
)
def test_a_refusal_names_the_bound(make_cell: MakeCell, bounds: dict[str, int], named: str) -> None:
    """The caller and the operator see which setting it was."""
    cell = make_cell(workers=0, **bounds)
    for _ in range(3):
        cell.submit([1, 2, 3], tenant="a")

    (refusal,) = orders(cell.outputs[-1], RequestFailed)
    assert (refusal.code, f"{named} allows" in refusal.message) == ("queue_full", True)
    assert cell.state.queued == 2


def test_a_tenants_bound_is_its_own(make_cell: MakeCell) -> None:
    """One tenant's full queue keeps nobody else out, and places come free again."""
    cell = make_cell(workers=0, max_queued_per_tenant=1)
    first = cell.submit([1], tenant="a")
    cell.submit([1], tenant="b")
    refused = cell.submit([1], tenant="a")
    assert cell.gateways["gateway"].ended == {refused: "queue_full"}

    cell.cancel(first)
    cell.submit([1], tenant="a")

    assert cell.state.tenants == {"b": 1, "a": 1}


def test_a_requests_own_bound_wins_over_the_cells(make_cell: MakeCell) -> None:
    """What its gateway says its tenant may have, be it more or less."""
    cell = make_cell(workers=0, max_queued_per_tenant=2)
    for tenant, bound in (("less", 1), ("more", 3)):
        for _ in range(4):
            cell.submit([1, 2, 3], tenant=tenant, max_queued=bound)

    assert cell.state.tenants == {"less": 1, "more": 3}
    (refusal,) = orders(cell.outputs[-1], RequestFailed)
    assert (refusal.code, refusal.message) == (
        "queue_full",
        "the queue is full: its tenant may have 3 waiting requests",
    )


def test_tenants_take_turns(make_cell: MakeCell) -> None:
    """One that floods the queue is served in turn with one that has a single request."""
    cell = make_cell(workers=0, max_running=1)
    for number in range(6):
        cell.submit([10 + number] * 8, tenant="flood", request_id=f"flood-{number}")
    cell.submit([90] * 8, tenant="other", request_id="other")

    cell.add_worker("worker-0")
    cell.drain()

    assert [admitted.request_id for admitted in cell.admitted].index("other") <= 1


def test_without_fair_share_arrival_decides(make_cell: MakeCell) -> None:
    """All tenants stand in one line."""
    cell = make_cell(workers=0, max_running=1, fair_share=False)
    for number in range(3):
        cell.submit([10 + number] * 8, tenant="flood", request_id=f"flood-{number}")
    cell.submit([90] * 8, tenant="other", request_id="other")

    cell.add_worker("worker-0")
    cell.drain()

    assert [admitted.request_id for admitted in cell.admitted][-1] == "other"


def test_the_output_of_a_tenant_counts_too(make_cell: MakeCell) -> None:
    """Who was served long answers is served later."""
    cell = make_cell(pages=64, max_running=1)
    cell.submit([1] * 4, tenant="long", max_tokens=60, ignore_eos=True)
    for number in range(2):
        cell.submit([10 + number] * 8, tenant="long", max_tokens=1, request_id=f"long-{number}")
        cell.submit([20 + number] * 8, tenant="short", max_tokens=1, request_id=f"short-{number}")
    cell.drain()

    assert [admitted.request_id for admitted in cell.admitted][1:3] == ["short-0", "short-1"]
