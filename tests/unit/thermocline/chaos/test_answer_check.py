"""An answer is held against the right one while it comes."""

from typing import Any

import pytest

from thermocline.chaos.answer_check import AnswerCheck, WrongAnswer
from thermocline.chaos.workload import Known

KNOWN = Known("s0.0", "/v1/completions", {}, (5, 6, 7), "abc", "length")


def event(token_ids: list[int], text: str, reason: str | None = None, **more: Any) -> dict[str, Any]:
    """One event of a stream."""
    return {"choices": [{"index": 0, "token_ids": token_ids, "text": text, "finish_reason": reason}], **more}


def check_of(*events: dict[str, Any]) -> AnswerCheck:
    """A check that took these events."""
    check = AnswerCheck(KNOWN)
    for each in events:
        check.event(each)
    return check


def test_the_right_answer_in_pieces_is_right() -> None:
    """However it is cut, and with its usage after it."""
    check = check_of(event([5], "a"), event([6, 7], "bc", "length"), {"choices": [], "usage": {"completion_tokens": 3}})

    check.done()

    assert check.is_done
    assert check.received == 3


def test_a_chat_s_content_is_compared_as_text_is() -> None:
    """In a delta and in a message alike."""
    for key in ("delta", "message"):
        choice = {"index": 0, "token_ids": [5, 6, 7], key: {"content": "abc"}, "finish_reason": "length"}
        check_of({"choices": [choice]}).done()


@pytest.mark.parametrize(
    ("events", "complaint"),
    [
        ([event([5], "a"), event([5], "a")], "token 1 differs"),
        ([event([5], "a"), event([7], "c")], "token 1 differs"),
        ([event([5, 6, 7, 8], "abcd")], "token 3 differs"),
        ([event([5], "x")], "text differs"),
        ([event([5, 6, 7], "abc", "length"), event([], "", "length")], "after its end"),
        ([{"choices": [{"index": 1, "token_ids": [5]}]}], "choice 1"),
        ([event([5], "a", usage={"completion_tokens": 2})], "usage counts 2"),
    ],
    ids=["repeat", "gap", "too many", "text", "goes on", "second choice", "usage"],
)
def test_what_no_client_may_see_is_found_at_once(events: list[dict[str, Any]], complaint: str) -> None:
    """A gap, a repeat, a changed token, a second end."""
    with pytest.raises(WrongAnswer, match=complaint):
        check_of(*events)


@pytest.mark.parametrize(
    ("events", "complaint"),
    [
        ([event([5, 6], "ab", "length")], "2 of 3 tokens"),
        ([event([5, 6, 7], "abc")], "without a reason"),
        ([event([5, 6, 7], "abc", "stop")], "ended for stop"),
        ([event([5, 6, 7], "ab", "length")], "text differs"),
    ],
    ids=["short", "no reason", "another reason", "text held back"],
)
def test_an_answer_that_ends_must_be_whole(events: list[dict[str, Any]], complaint: str) -> None:
    """What is missing shows only at the end."""
    check = check_of(*events)

    with pytest.raises(WrongAnswer, match=complaint):
        check.done()


def test_nothing_follows_the_end() -> None:
    """Neither a second [DONE] nor an event."""
    check = check_of(event([5, 6, 7], "abc", "length"))
    check.done()

    with pytest.raises(WrongAnswer, match="twice"):
        check.done()
    with pytest.raises(WrongAnswer, match="follows"):
        check.event(event([], ""))
