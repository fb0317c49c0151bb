"""Requests whose worker is gone."""

import pytest

from services.scheduler.core.resumption import RESUME_TIMEOUT_MS
from shared.messages.base import pack_int32, unpack_int32
from shared.messages.requests import ResumeRequest


@pytest.fixture
def orphan(make_cell):
    """A cell whose only worker died while a request ran."""
    cell = make_cell(pages=64)
    cell.submit([1] * 8, max_tokens=6, ignore_eos=True, request_id="a")
    for _ in range(3):
        cell.round()
    cell.lose_worker("worker-0")
    return cell


def answer(attempt=2, output=(), gateway_id="gateway"):
    """A ResumeRequest."""
    return ResumeRequest(request_id="a", gateway_id=gateway_id, attempt=attempt, output=pack_int32(output))


def test_the_next_attempt_starts_after_what_the_gateway_has(orphan):
    """Prompt and received tokens are computed; nothing is sent twice or skipped."""
    received = list(orphan.gateways["gateway"].tokens["a"])
    assert received

    orphan.answer_resume("gateway")
    orphan.add_worker("worker-0", pages=64)
    orphan.drain()
    orphan.check_answers()

    assert unpack_int32(orphan.admitted[-1].tokens) == [1] * 8 + received
    assert orphan.admitted[-1].prompt_tokens == 8
    assert len(orphan.gateways["gateway"].tokens["a"]) == 6


@pytest.mark.parametrize("wrong", [{"attempt": 1}, {"attempt": 3}, {"gateway_id": "other"}])
def test_an_answer_to_another_question_is_stale(orphan, wrong):
    """Only the attempt that was asked for resumes."""
    orphan.feed(answer(**wrong))

    assert orphan.state.requests["a"].state.value == "resuming"


def test_a_gateway_with_every_token_still_gets_the_end(orphan):
    """At least one token is sampled again, because it brings the finish reason."""
    orphan.feed(answer(output=[1, 2, 3, 4, 5, 6]))

    assert orphan.state.requests["a"].output == pack_int32([1, 2, 3, 4, 5])


def test_a_gateway_that_never_answers_is_not_waited_for(orphan):
    """The timer ends the request."""
    (timer,) = orphan.timers
    assert orphan.timers[timer] == orphan.time_ns + RESUME_TIMEOUT_MS * 1_000_000

    orphan.fire(timer)

    assert orphan.state.requests == {}
    assert orphan.gateways["gateway"].ended == {"a": "service_unavailable"}


def test_workers_may_die_only_so_often(make_cell):
    """max_attempts bounds the starts."""
    cell = make_cell(pages=64, max_attempts=2)
    cell.submit([1] * 8, max_tokens=50, ignore_eos=True, request_id="a")
    for _ in range(2):
        cell.round()
        cell.lose_worker("worker-0")
        cell.answer_resume("gateway")
        cell.add_worker("worker-0", pages=64)

    assert cell.gateways["gateway"].ended == {"a": "attempts_exhausted"}
