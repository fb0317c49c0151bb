"""A gateway can ask again for everything that was said about a request, from any position on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.worker.retained import RetainedOutputs
from shared.messages.tokens import TokenItem, TokenLogprob, Usage
from shared.messages.worker_events import FinishReason


def item(index: int, *, request_id: str = "r", attempt: int = 1, finish: FinishReason | None = None) -> TokenItem:
    return TokenItem(
        request_id=request_id,
        attempt=attempt,
        index=index,
        tokens=(100 + index,),
        text=chr(97 + index),
        logprobs=(TokenLogprob(token=100 + index, logprob=-1.0),),
        finish=finish,
        usage=Usage(computed_tokens=index) if finish else None,
    )


@given(st.integers(1, 20), st.integers(0, 25), st.booleans())
def test_items_are_joined_from_the_position_asked_for(count: int, index: int, finished: bool) -> None:
    """Tokens, text, logprobs and the end are those of the items from there on."""
    retained = RetainedOutputs(4)
    for position in range(count):
        retained.add(item(position, finish="stop" if finished and position == count - 1 else None))

    found = retained.find("r", index, max_bytes=10**6)

    assert found is not None
    assert found.tokens == tuple(100 + position for position in range(index, count))
    assert found.text == "".join(chr(97 + position) for position in range(index, count))
    assert len(found.logprobs) == len(found.tokens)
    assert found.index == index
    assert found.finish == ("stop" if finished and index < count else None)


def test_an_end_without_tokens_is_found_after_the_last_one() -> None:
    """An aborted request says so in an item that brings no token."""
    retained = RetainedOutputs(4)
    retained.add(item(0))
    retained.add(TokenItem(request_id="r", attempt=1, index=1, tokens=(), finish="cancelled"))

    found = retained.find("r", 1, max_bytes=999)

    assert found is not None
    assert (found.tokens, found.finish) == ((), "cancelled")


def collected(retained: RetainedOutputs) -> list[tuple[int, int, str]]:
    """Attempt, token and text of everything that asking brings, as a gateway asks from position 0 on."""
    said: list[tuple[int, int, str]] = []
    index = 0
    while True:
        found = retained.find("r", index, max_bytes=10**6)
        assert found is not None
        if found.index != index or not found.tokens:
            return said
        said += [(found.attempt, token, text) for token, text in zip(found.tokens, found.text, strict=True)]
        index += len(found.tokens)


def test_what_was_said_before_a_preemption_can_still_be_asked_for() -> None:
    """The next attempt goes on behind it and never says it again, so it must not be dropped."""
    retained = RetainedOutputs(4)
    retained.add(item(0, attempt=1))
    retained.add(item(1, attempt=1))
    retained.retire("r")
    retained.add(item(2, attempt=2))

    assert collected(retained) == [(1, 100, "a"), (1, 101, "b"), (2, 102, "c")]


def test_what_an_attempt_begins_with_is_its_own_with_logprobs_as_they_were_said() -> None:
    """A recalled token has none, so what was said here is kept; what was said elsewhere is added."""
    retained = RetainedOutputs(4)
    retained.add(item(0, attempt=1))
    retained.retire("r")
    for index in range(2):
        bare = TokenItem(request_id="r", attempt=3, index=index, tokens=(100 + index,), text=chr(97 + index))
        retained.recall(bare)
    retained.add(item(2, attempt=3))

    found = retained.find("r", 0, max_bytes=10**6)
    assert found is not None
    assert (found.attempt, found.tokens, found.text) == (3, (100, 101, 102), "abc")
    assert [one.token for one in found.logprobs] == [100, 102]


def test_what_an_older_attempt_said_behind_a_new_beginning_is_not_joined_to_it() -> None:
    """A lossy attempt that goes on elsewhere may say other tokens; until it does, the old ones are told apart."""
    retained = RetainedOutputs(4)
    for index in range(4):
        retained.add(item(index, attempt=1))
    retained.retire("r")
    retained.recall(TokenItem(request_id="r", attempt=3, index=0, tokens=(100,), text="a"))
    retained.recall(TokenItem(request_id="r", attempt=3, index=1, tokens=(7,), text="x"))

    assert collected(retained) == [(3, 100, "a"), (3, 7, "x")]

    retained.add(TokenItem(request_id="r", attempt=3, index=2, tokens=(8,), text="y"))
    assert collected(retained) == [(3, 100, "a"), (3, 7, "x"), (3, 8, "y")]


def test_a_new_attempts_word_replaces_older_ones_from_there_on() -> None:
    """What it has not said yet is marked as the older attempt's until then, and never follows in one item."""
    retained = RetainedOutputs(4)
    for index in range(4):
        retained.add(item(index, attempt=1))
    retained.recall(item(0, attempt=2))

    assert collected(retained) == [(2, 100, "a"), (1, 101, "b"), (1, 102, "c"), (1, 103, "d")]

    retained.add(TokenItem(request_id="r", attempt=2, index=1, tokens=(7,), text="x"))
    assert collected(retained) == [(2, 100, "a"), (2, 7, "x")]


def test_the_end_of_an_older_attempt_is_not_the_end() -> None:
    """A newer attempt that goes on from there has an end of its own."""
    retained = RetainedOutputs(4)
    retained.add(item(0, attempt=1))
    retained.add(TokenItem(request_id="r", attempt=1, index=1, tokens=(), finish="error"))
    retained.add(item(1, attempt=2))

    assert collected(retained) == [(1, 100, "a"), (2, 101, "b")]
    found = retained.find("r", 0, max_bytes=10**6)
    assert found is not None
    assert found.finish is None


def test_an_older_attempt_that_is_late_adds_nothing() -> None:
    """What it says is no part of the answer any more, and does not keep a request that is over for ever."""
    retained = RetainedOutputs(1)
    retained.add(item(0, attempt=2))
    retained.retire("r")
    retained.add(item(1, attempt=1))
    retained.recall(item(1, attempt=1))

    assert collected(retained) == [(2, 100, "a")]
    retained.add(item(0, request_id="other", finish="stop"))
    assert retained.find("r", 0, max_bytes=999) is None


def test_what_lies_behind_a_gap_is_not_joined_to_what_lies_before() -> None:
    """Another worker said what is missing; tokens would get wrong positions."""
    retained = RetainedOutputs(4)
    retained.add(item(0, attempt=1))
    retained.add(item(3, attempt=3))

    found, behind = retained.find("r", 0, max_bytes=10**6), retained.find("r", 1, max_bytes=10**6)

    assert found is not None
    assert behind is not None
    assert (found.index, found.tokens) == (0, (100,))
    assert (behind.index, behind.tokens) == (3, (103,))


def test_a_request_that_goes_on_is_kept_however_many_others_end() -> None:
    """It was among the finished ones after its preemption, and is not any more."""
    retained = RetainedOutputs(1)
    retained.add(item(0, attempt=1))
    retained.retire("r")
    retained.recall(item(0, attempt=2))
    for name in ("a", "b", "c"):
        retained.add(item(0, request_id=name, finish="stop"))

    assert collected(retained) == [(2, 100, "a")]


def test_only_the_last_finished_requests_are_kept() -> None:
    """Running ones are not counted."""
    retained = RetainedOutputs(2)
    retained.add(item(0, request_id="running"))
    for name in ("a", "b", "c"):
        retained.add(item(0, request_id=name, finish="stop"))

    known = [name for name in ("running", "a", "b", "c") if retained.find(name, 0, max_bytes=999)]

    assert known == ["running", "b", "c"]


def test_a_long_answer_is_cut_between_tokens() -> None:
    """What does not fit in one message has no end yet; the gateway asks for the rest."""
    retained = RetainedOutputs(2)
    for position in range(20):
        retained.add(item(position, finish="stop" if position == 19 else None))

    first = retained.find("r", 0, max_bytes=2000)
    assert first is not None
    assert 0 < len(first.tokens) < 20
    assert first.finish is None
    rest = retained.find("r", len(first.tokens), max_bytes=10**6)
    assert rest is not None
    assert first.tokens + rest.tokens == tuple(range(100, 120))
    assert rest.finish == "stop"
