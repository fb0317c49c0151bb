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


def test_an_unknown_request_is_none() -> None:
    """The gateway then waits for the scheduler's word."""
    retained = RetainedOutputs(4)
    retained.add(item(0))

    assert retained.find("other", 0, max_bytes=999) is None


def test_an_end_without_tokens_is_found_after_the_last_one() -> None:
    """An aborted request says so in an item that brings no token."""
    retained = RetainedOutputs(4)
    retained.add(item(0))
    retained.add(TokenItem(request_id="r", attempt=1, index=1, tokens=(), finish="cancelled"))

    found = retained.find("r", 1, max_bytes=999)

    assert found is not None
    assert (found.tokens, found.finish) == ((), "cancelled")


def test_a_newer_attempt_replaces_an_older_one() -> None:
    """Only the newest attempt's items are kept."""
    retained = RetainedOutputs(4)
    retained.add(item(0, attempt=1))
    retained.add(item(1, attempt=2))

    found = retained.find("r", 0, max_bytes=999)

    assert found is not None
    assert found.index == 1


def test_only_the_last_finished_requests_are_kept() -> None:
    """Running ones are not counted."""
    retained = RetainedOutputs(2)
    retained.add(item(0, request_id="running"))
    for name in ("a", "b", "c"):
        retained.add(item(0, request_id=name, finish="stop"))

    known = [name for name in ("running", "a", "b", "c") if retained.find(name, 0, max_bytes=999)]

    assert known == ["running", "b", "c"]


def test_a_preempted_request_is_still_known() -> None:
    """What its gateway missed can be asked for until the next attempt has recalled it."""
    retained = RetainedOutputs(2)
    retained.add(item(0))
    retained.retire("r")

    found = retained.find("r", 0, max_bytes=999)

    assert found is not None
    assert found.tokens == (100,)


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
