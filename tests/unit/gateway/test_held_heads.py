"""What a gateway takes its cell to hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.held_heads import HeldHeads, pack_heads, unpack_heads
from services.gateway.prompt_heads import Head


def head(*digests: int) -> Head:
    """A head whose depths are 100 bytes apart and whose text ends with the last."""
    return Head(digests, tuple(100 * (place + 1) for place in range(len(digests))), 100 * len(digests))


def test_what_was_answered_is_held() -> None:
    """All heads of the prompt, told as added once."""
    held = HeldHeads()
    held.note(head(1, 2, 3), 30, 0)
    first = held.take_changes()
    held.note(head(1, 2, 3), 30, 30)
    second = held.take_changes()

    assert sorted(unpack_heads(first[0])) == [1, 2, 3]
    assert second == (b"", b"")
    assert held.tokens == 30


def test_the_oldest_goes_when_the_cell_has_no_room() -> None:
    """In the order of last use, the deepest of a prompt first, so that no head is held without what is above it."""
    held = HeldHeads()
    held.bound(50)
    held.note(head(1, 2, 3), 30, 0)
    held.note(head(1, 9, 8), 30, 10)
    held.take_changes()
    held.note(head(1, 9, 7), 30, 20)
    added, removed = held.take_changes()

    assert unpack_heads(added) == [7]
    assert unpack_heads(removed) == [3]
    assert held.tokens == 50


def test_a_head_that_was_not_found_shows_what_the_cell_has_given_up() -> None:
    """What was used before it goes, too, but no more than an eighth at once."""
    held = HeldHeads()
    for number in range(1, 17):
        held.note(head(100 * number, 100 * number + 1), 20, 0)
    held.take_changes()
    held.note(head(800, 801), 20, 0)
    removed = unpack_heads(held.take_changes()[1])

    assert sorted(removed) == [100, 101, 200, 201]


def test_a_summary_has_all_and_changes_begin_behind_it() -> None:
    """What a whole summary has told is not told again."""
    held = HeldHeads(most=4)
    held.note(head(1, 2, 3), 30, 0)
    held.note(head(4, 5, 6), 30, 0)
    whole = held.take_whole()

    assert sorted(unpack_heads(whole)) == [1, 4, 5, 6]
    assert held.take_changes() == (b"", b"")


def test_an_empty_cell_holds_nothing() -> None:
    """Everything is told as removed."""
    held = HeldHeads()
    held.note(head(1, 2), 20, 0)
    held.take_changes()
    held.clear()

    assert sorted(unpack_heads(held.take_changes()[1])) == [1, 2]
    assert held.tokens == len(held) == 0


@given(st.lists(st.tuples(st.lists(st.integers(0, 30), min_size=1, max_size=6, unique=True), st.integers(0, 60))))
def test_changes_add_up_to_what_is_held(asked: list[tuple[list[int], int]]) -> None:
    """Whoever applies every change has exactly what a whole summary says."""
    held = HeldHeads(most=12)
    held.bound(80)
    copy: set[int] = set()
    for digests, cached in asked:
        held.note(head(*digests), 60, cached)
        added, removed = held.take_changes()
        copy = (copy - set(unpack_heads(removed))) | set(unpack_heads(added))

    assert copy == set(unpack_heads(held.take_whole()))
    assert len(held) <= 12
    assert held.tokens <= 80


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_packed_digests_come_back(digests: list[int]) -> None:
    """And half a digest at the end is passed over."""
    assert unpack_heads(pack_heads(digests) + b"abc") == digests
