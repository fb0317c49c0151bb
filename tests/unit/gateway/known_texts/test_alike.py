"""Long texts are compared with those of late that begin alike."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.known_texts.alike import MOST_ALIKE, TextsAlike

PIECES = st.lists(st.sampled_from(["a", "b", "word ", "東", "😀"]), max_size=40).map("".join)


@given(front=PIECES, one=PIECES, other=PIECES)
def test_what_agrees_agrees(front: str, one: str, other: str) -> None:
    """All of what both begin with, or less by no more than a step."""
    texts: TextsAlike[int] = TextsAlike(2**20, least_characters=8)
    known, text = f"12345678{front}{one}", f"12345678{front}{other}"
    texts.put("n", known, 7, 0, None)

    found = texts.nearest("n", text)

    assert found is not None
    entry, agreed = found
    common = next((place for place in range(len(known)) if known[place] != text[place : place + 1]), len(known))
    assert (entry.text, entry.value) == (known, 7)
    assert common - 8 < agreed <= common


def test_the_nearest_of_several_is_found() -> None:
    """However late the others are."""
    texts: TextsAlike[str] = TextsAlike(2**20, least_characters=8)
    texts.put("n", "the same front and one end", "one", 0, None)
    texts.put("n", "the same front of another", "other", 0, None)

    found = [texts.nearest("n", f"the same front {end}") for end in ("and one", "of another")]

    assert [each and each[0].value for each in found] == ["one", "other"]


def test_of_many_that_begin_alike_the_latest_are_kept() -> None:
    """One system prompt has any number of conversations behind it."""
    texts: TextsAlike[int] = TextsAlike(2**20, least_characters=8)
    for number in range(MOST_ALIKE + 3):
        texts.put("n", f"the same front {number}" * 4, number, 0, None)
    one = texts.nbytes // MOST_ALIKE

    texts.put("n", "the same front again" * 4, 0, 0, None)

    assert abs(texts.nbytes - MOST_ALIKE * one) < one


def test_what_goes_on_takes_the_place_of_what_it_goes_on_from() -> None:
    """A conversation is kept once."""
    texts: TextsAlike[int] = TextsAlike(2**20, least_characters=8)
    texts.put("n", "the same front", 1, 0, None)
    found = texts.nearest("n", "the same front, and more")
    assert found is not None
    before = texts.nbytes

    texts.put("n", "the same front, and more", 2, 0, found[0])

    assert texts.nbytes - before == len(", and more")


def test_nothing_is_kept_of_short_texts_nor_without_room() -> None:
    """Nor told."""
    told: list[int] = []
    for texts in (TextsAlike[int](0, told.append, least_characters=8), TextsAlike[int](2**20, told.append)):
        texts.put("n", "a text", 1, 0, None)

        assert texts.nearest("n", "a text") is None
        assert texts.nbytes == 0
    assert told == []
