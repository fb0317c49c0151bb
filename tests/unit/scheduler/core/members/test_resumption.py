"""Requests whose worker is gone."""

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from services.scheduler.core.members.membership import RESUME_TIMEOUT_MS
from shared.messages.base import pack_int32, unpack_int32
from shared.messages.gateway_notices import ResumeNeeded
from shared.messages.requests import ReclaimRequest, ResumeRequest, SubmitRequest
from tests.stateful.cell_model import CellModel
from tests.unit.scheduler.core.cell_fixtures import MakeCell


@pytest.fixture
def orphan(make_cell: MakeCell) -> CellModel:
    """A cell whose only worker died while a request ran."""
    cell = make_cell(pages=64)
    cell.submit([1] * 8, max_tokens=6, ignore_eos=True, request_id="a")
    for _ in range(3):
        cell.round()
    cell.lose_worker("worker-0")
    return cell


def answer(attempt: int = 2, output: Sequence[int] = (), gateway_id: str = "gateway") -> ResumeRequest:
    """A ResumeRequest."""
    return ResumeRequest(request_id="a", gateway_id=gateway_id, attempt=attempt, output=pack_int32(output))


def test_the_next_attempt_starts_after_what_the_gateway_has(orphan: CellModel) -> None:
    """Prompt and received tokens are computed; nothing is sent twice or skipped."""
    received = list(orphan.gateways["gateway"].tokens["a"])
    assert received

    orphan.answer_resume("gateway")
    orphan.add_worker("worker-0", pages=64)
    orphan.drain()

    assert unpack_int32(orphan.admitted[-1].tokens) == [1] * 8 + received
    assert orphan.admitted[-1].prompt_tokens == 8
    assert len(orphan.gateways["gateway"].tokens["a"]) == 6


@pytest.mark.parametrize("wrong", [{"attempt": 1}, {"attempt": 3}, {"gateway_id": "other"}])
def test_an_answer_to_another_question_is_stale(orphan: CellModel, wrong: dict[str, Any]) -> None:
    """Only the attempt that was asked for resumes."""
    orphan.feed(answer(**wrong))

    assert orphan.state.requests["a"].state.value == "resuming"


def test_a_gateway_with_every_token_still_gets_the_end(orphan: CellModel) -> None:
    """At least one token is sampled again, because it brings the finish reason."""
    orphan.feed(answer(output=[1, 2, 3, 4, 5, 6]))

    assert orphan.state.requests["a"].output == pack_int32([1, 2, 3, 4, 5])


def test_a_gateway_that_never_answers_is_not_waited_for(orphan: CellModel) -> None:
    """The timer ends the request."""
    (timer,) = orphan.timers
    assert orphan.timers[timer] == orphan.time_ns + RESUME_TIMEOUT_MS * 1_000_000

    orphan.fire(timer)

    assert orphan.state.requests == {}
    assert orphan.gateways["gateway"].ended == {"a": "service_unavailable"}


def test_workers_may_die_only_so_often(make_cell: MakeCell) -> None:
    """max_attempts bounds the starts."""
    cell = make_cell(pages=64, max_attempts=2)
    cell.submit([1] * 8, max_tokens=50, ignore_eos=True, request_id="a")
    for _ in range(2):
        cell.round()
        cell.lose_worker("worker-0")
        cell.answer_resume("gateway")
        cell.add_worker("worker-0", pages=64)

    assert cell.gateways["gateway"].ended == {"a": "attempts_exhausted"}


def reopen(cell: CellModel, *, keep: int) -> SubmitRequest:
    """Have the gateway miss the end of request "a" and all tokens but the first ``keep``; returns the request."""
    gateway, submitted = cell.gateways["gateway"], cell.submitted["a"]
    assert gateway.ended.pop("a") == "finished"
    gateway.open["a"] = submitted
    del gateway.tokens["a"][keep:]
    return submitted


@pytest.mark.parametrize("keep", [0, 3])
def test_a_request_whose_end_was_lost_begins_again(make_cell: MakeCell, keep: int) -> None:
    """What a dead worker said last reached nobody: the answer goes on behind what did, as another attempt."""
    cell = make_cell(pages=64)
    cell.serve([1] * 8, max_tokens=6, ignore_eos=True, request_id="a")
    submitted = reopen(cell, keep=keep)

    outputs = cell.feed(ReclaimRequest(submit=submitted))
    assert [output.word for output in outputs if hasattr(output, "word")] == [ResumeNeeded(request_id="a", attempt=2)]
    cell.answer_resume("gateway")
    cell.drain()

    assert len(cell.gateways["gateway"].tokens["a"]) == 6
    assert unpack_int32(cell.admitted[-1].tokens)[8:] == cell.gateways["gateway"].tokens["a"][:keep]
    assert cell.state.counters["requests_reclaimed"] == 1


def test_a_reclaimed_request_may_have_been_answered_meanwhile(make_cell: MakeCell) -> None:
    """Its gateway says so instead of where to go on, and nothing is computed."""
    cell = make_cell(pages=64)
    cell.serve([1] * 8, max_tokens=6, ignore_eos=True, request_id="a")
    admitted = len(cell.admitted)

    cell.feed(ReclaimRequest(submit=cell.submitted["a"]))
    cell.answer_resume("gateway")
    cell.drain()

    assert len(cell.admitted) == admitted
    assert cell.state.requests == {}


def test_what_is_under_way_is_not_begun_again(make_cell: MakeCell) -> None:
    """A gateway asked too early: the request waits, runs or has just been submitted again."""
    cell = make_cell(pages=64)
    cell.submit([1] * 8, max_tokens=6, ignore_eos=True, request_id="a")

    outputs = cell.feed(ReclaimRequest(submit=cell.submitted["a"]))
    cell.drain()

    assert outputs == []
    assert cell.state.counters["stale_inputs"] == 1
    assert cell.gateways["gateway"].ended == {"a": "finished"}


def test_a_reclaimed_request_keeps_its_deadline(make_cell: MakeCell) -> None:
    """What was left of it when the gateway asked."""
    cell = make_cell(pages=64)
    cell.serve([1] * 8, max_tokens=6, ignore_eos=True, request_id="a", deadline_ms=60_000)
    submitted = msgspec.structs.replace(reopen(cell, keep=2), deadline_ms=500)

    cell.feed(ReclaimRequest(submit=submitted))
    (due,) = [at for name, at in cell.timers.items() if name.startswith("deadline")]

    assert due == cell.time_ns + 500_000_000
