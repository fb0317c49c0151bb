"""Whatever order, repetition or loss tokens arrive with, the assembled answer is the one that was generated."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.assembly import MAX_HELD_ITEMS, Assembly, Placement
from shared.messages.tokens import ImportanceUsage, TokenItem, TokenLogprob, Usage

ANSWER = 12
"""Output tokens of the true answer: token 100 + i with text <i>, and the end with the last."""


def item(start: int, end: int, attempt: int = 1) -> TokenItem:
    """Positions [start, end) of the true answer, as a worker would send them."""
    return TokenItem(
        request_id="r",
        attempt=attempt,
        index=start,
        tokens=tuple(100 + i for i in range(start, end)),
        text="".join(f"<{i}>" for i in range(start, end)),
        logprobs=tuple(TokenLogprob(token=100 + i, logprob=-1.0) for i in range(start, end)),
        finish="length" if end == ANSWER else None,
        usage=Usage(device_tokens=attempt) if start == 0 else None,
    )


LOADED = ImportanceUsage(
    ratio=0.25, metric="last_pooled", loaded_tokens=4, layers=6, layers_fallen_back=1, disk_bytes=100
)


WHOLE = "".join(f"<{i}>" for i in range(ANSWER))


def test_items_in_order_make_the_answer() -> None:
    """One token at a time, each is accepted, and the last one finishes."""
    assembly = Assembly()
    placements = [assembly.accept(item(i, i + 1)) for i in range(ANSWER)]

    assert placements == [Placement.ACCEPTED] * ANSWER
    assert assembly.take().text == WHOLE
    assert assembly.is_finished


def test_a_repeat_changes_nothing() -> None:
    """An item that came already is dropped, text included."""
    assembly = Assembly()
    assembly.accept(item(0, 3))

    assert assembly.accept(item(1, 2)) is Placement.REPEATED
    assert assembly.accept(item(0, 3)) is Placement.REPEATED
    assert assembly.take().text == "<0><1><2>"


def test_a_gap_holds_later_items_until_it_is_filled() -> None:
    """What came after a gap is not shown before what fills it, and then at once."""
    assembly = Assembly()
    assembly.accept(item(0, 1))
    assert assembly.accept(item(2, 3)) is Placement.GAP
    assert assembly.accept(item(3, 4)) is Placement.GAP
    assert assembly.has_gap
    assert assembly.take().text == "<0>"

    assert assembly.fill(item(1, 2)) is Placement.ACCEPTED
    assert assembly.take().text == "<1><2><3>"
    assert not assembly.has_gap


def test_an_overlap_is_asked_for_again_because_text_cannot_be_cut() -> None:
    """An item that is half known is no repeat and cannot be taken either."""
    assembly = Assembly()
    assembly.accept(item(0, 3))

    assert assembly.accept(item(2, 5)) is Placement.GAP
    assert assembly.take().text == "<0><1><2>"


def test_older_attempts_are_fenced() -> None:
    """After attempt 2 was announced, attempt 1 cannot add anything unasked."""
    assembly = Assembly()
    assembly.accept(item(0, 2))
    assembly.fence(2)

    assert assembly.accept(item(2, 3, attempt=1)) is Placement.FENCED
    assert assembly.accept(item(2, 3, attempt=2)) is Placement.ACCEPTED
    assert assembly.take().text == "<0><1><2>"


def test_a_newer_attempt_fences_by_speaking() -> None:
    """After a preemption nobody announces the new attempt; its first item does."""
    assembly = Assembly()
    assembly.accept(item(0, 2))
    assembly.accept(item(2, 3, attempt=4))

    assert assembly.attempt == 4
    assert assembly.accept(item(3, 4, attempt=3)) is Placement.FENCED


def test_what_was_said_before_a_preemption_may_be_asked_for() -> None:
    """The new attempt goes on behind everything that the old one said, so that is a part of the answer."""
    assembly = Assembly()
    assembly.accept(item(0, 2))
    assert assembly.accept(item(4, 5, attempt=2)) is Placement.GAP

    assert assembly.fill(item(2, 4, attempt=1)) is Placement.ACCEPTED
    assert assembly.take().text == "<0><1><2><3><4>"


def test_an_attempt_that_was_resumed_is_not_mixed_with_older_ones() -> None:
    """It builds on what was here then: a lossy one may say other tokens than an older attempt that is asked."""
    assembly = Assembly()
    assembly.accept(item(0, 2))
    assembly.fence(2)

    old = msgspec.structs.replace(item(2, ANSWER), tokens=tuple(range(200, 210)), text="other")
    assert assembly.fill(old) is Placement.FENCED
    assert not assembly.is_finished
    assert assembly.fill(item(2, 3, attempt=2)) is Placement.ACCEPTED
    assert assembly.accept(item(5, 6, attempt=3)) is Placement.GAP
    assert assembly.fill(old) is Placement.FENCED
    assert assembly.fill(item(3, 5, attempt=2)) is Placement.ACCEPTED
    assert assembly.tokens == [100 + i for i in range(6)]


def test_items_held_for_an_old_attempt_are_let_go() -> None:
    """A held item of a fenced attempt does not join later."""
    assembly = Assembly()
    assembly.accept(item(1, 2, attempt=1))
    assembly.fence(2)
    assembly.accept(item(0, 1, attempt=2))

    assert assembly.take().text == "<0>"


def test_the_end_is_taken_from_an_item_whose_token_is_known() -> None:
    """A resumed attempt repeats the last token, and brings the end with it."""
    assembly = Assembly()
    assembly.accept(item(0, ANSWER - 1))
    assembly.accept(TokenItem(request_id="r", attempt=1, index=ANSWER - 1, tokens=(100 + ANSWER - 1,), text="<11>"))

    assert assembly.accept(item(ANSWER - 1, ANSWER, attempt=2)) is Placement.ACCEPTED
    delta = assembly.take()
    assert (delta.text, delta.finish) == (WHOLE, "length")


def test_an_end_without_tokens_flushes_withheld_text() -> None:
    """An item may bring text and the end alone."""
    assembly = Assembly()
    assembly.accept(item(0, 1))
    assembly.accept(TokenItem(request_id="r", attempt=1, index=1, tokens=(), text="tail", finish="stop"))

    delta = assembly.take()
    assert (delta.text, delta.finish, delta.tokens) == ("<0>tail", "stop", [100])


def test_usage_is_that_of_the_first_attempt() -> None:
    """A resumed attempt finds its own earlier work; the caller's prompt was found where the first one says."""
    assembly = Assembly()
    assembly.accept(item(0, 1))
    resumed = TokenItem(request_id="r", attempt=2, index=1, tokens=(101,), usage=Usage(device_tokens=99))
    assembly.accept(resumed)

    assert assembly.usage == Usage(device_tokens=1)


def test_take_gives_each_thing_once() -> None:
    """A second take is empty."""
    assembly = Assembly()
    assembly.accept(item(0, ANSWER))
    first, second = assembly.take(), assembly.take()

    assert len(first.tokens) == len(first.logprobs) == ANSWER
    assert second.is_empty
    assert second.finish is None


def test_held_items_are_bounded() -> None:
    """A flood beyond a gap is dropped, not kept."""
    assembly = Assembly()
    for index in range(1, MAX_HELD_ITEMS + 100):
        assembly.accept(TokenItem(request_id="r", attempt=1, index=index, tokens=(1,)))
    assembly.accept(TokenItem(request_id="r", attempt=1, index=0, tokens=(1,)))

    assert assembly.next_index == MAX_HELD_ITEMS + 1


@given(data=st.data())
def test_any_delivery_with_refetching_gives_the_true_answer(data: st.DataObject) -> None:
    """Drops, repeats, reordering and attempts in any order: after fetching what is missing, text is exact."""
    assembly = Assembly()
    shown = ""
    for _ in range(data.draw(st.integers(0, 40), label="deliveries")):
        start = data.draw(st.integers(0, ANSWER - 1), label="start")
        end = data.draw(st.integers(start + 1, min(ANSWER, start + 3)), label="end")
        attempt = data.draw(st.integers(1, 3), label="attempt")
        if data.draw(st.booleans(), label="fences"):
            assembly.fence(attempt)
        placement = assembly.accept(item(start, end, attempt))
        if placement is Placement.GAP and data.draw(st.booleans(), label="fetches"):
            last = data.draw(st.integers(assembly.next_index + 1, ANSWER), label="fetched to")
            assembly.fill(item(assembly.next_index, last, attempt=max(attempt, assembly.resumed)))
        shown += assembly.take().text

        assert shown == WHOLE[: len(shown)]
        assert assembly.tokens == [100 + i for i in range(assembly.next_index)]
    while not assembly.is_finished:
        rest = item(assembly.next_index, ANSWER, attempt=assembly.resumed)
        assert assembly.fill(rest) is Placement.ACCEPTED
    shown += assembly.take().text

    assert shown == WHOLE
    assert assembly.tokens == [100 + i for i in range(ANSWER)]


@given(order=st.permutations(range(ANSWER)))
def test_any_order_of_single_tokens_gives_the_true_answer(order: list[int]) -> None:
    """Held items join as soon as they fit, so a mere reordering needs no fetch at all."""
    assembly = Assembly()
    for index in order:
        assembly.accept(item(index, index + 1))

    assert assembly.take().text == WHOLE
    assert assembly.is_finished


def test_an_attempt_that_goes_on_behind_a_sparse_prefix_is_told() -> None:
    """Its tokens are lossy, although the first attempt's were not and usage stays that of the first."""
    assembly = Assembly()
    lossy = Usage(sparse_tokens=16, importance=LOADED)
    assembly.accept(item(0, 3))
    assembly.accept(msgspec.structs.replace(item(3, 5, attempt=2), usage=lossy))

    assert assembly.usage == Usage(device_tokens=1)
    assert assembly.lossy == {2: lossy}


def test_the_last_word_of_a_lossy_attempt_counts_once() -> None:
    """Usage comes with the first and the last item; they are not two loads."""
    assembly = Assembly()
    first, last = (Usage(sparse_tokens=16, importance=msgspec.structs.replace(LOADED, layers=n)) for n in (5, 6))
    assembly.accept(msgspec.structs.replace(item(0, 3), usage=first))
    assembly.accept(msgspec.structs.replace(item(3, ANSWER), usage=last))

    assert assembly.lossy == {1: last}


def test_what_is_dropped_makes_no_answer_lossy() -> None:
    """A fenced attempt adds no token, so what it loaded does not matter."""
    assembly = Assembly()
    assembly.fence(2)
    assembly.accept(msgspec.structs.replace(item(0, 3), usage=Usage(sparse_tokens=16, importance=LOADED)))

    assert assembly.lossy == {}
