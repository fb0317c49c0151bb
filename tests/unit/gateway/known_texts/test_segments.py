"""A text has the same segments when it goes on, and the search for boundaries is bounded."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.known_texts import segments as module
from services.gateway.known_texts.boundaries import Boundaries
from services.gateway.known_texts.segments import segments

SMALL = Boundaries(re.compile("<end>"), re.compile("[a-z](?= )"), least_characters=4, usual_characters=12)
TEXTS = st.lists(st.sampled_from(["word", " ", "x", "<end>", "<e", "nd>", "........"]), max_size=60).map("".join)


def parts(text: str, boundaries: Boundaries = SMALL) -> list[str]:
    cut = segments(text, boundaries)
    return [text[start:end] for start, end in [*cut.closed, cut.tail]]


@given(text=TEXTS)
def test_the_parts_are_the_text(text: str) -> None:
    """Each ends at a boundary but the last, and none is shorter than the least."""
    found = parts(text)

    assert "".join(found) == text
    for part, following in itertools.pairwise(found):
        assert len(part) >= SMALL.least_characters
        assert following.startswith("<end>") or (part[-1].isalpha() and following[0] == " ")


@given(text=TEXTS, more=TEXTS)
def test_a_text_that_goes_on_has_the_same_segments(text: str, more: str) -> None:
    """But for the last, and one that a token joins to what is new."""
    front, whole = parts(text)[:-1], parts(text + more)

    assert whole[: max(0, len(front) - 1)] == front[:-1]


@given(text=st.lists(st.sampled_from(["word", " ", "x", "<end>", "<", "[", "[end]", "<e"]), max_size=80).map("".join))
def test_looking_for_what_tokens_begin_with_finds_the_same(text: str) -> None:
    """As searching for the tokens, also where their first characters are many."""
    tokens = re.compile(r"<end>|\[end\]")
    searched = Boundaries(tokens, SMALL.others, least_characters=4, usual_characters=40)

    assert parts(text, replace(searched, openings="<[")) == parts(text, searched)


def test_many_beginnings_of_tokens_are_searched_for_whole_ones() -> None:
    """So that a text of nothing else costs no more than a search."""
    text = f"{'x' * 10}{'<' * 100}<end>{'[' * 100}[end]"
    boundaries = Boundaries(re.compile(r"<end>|\[end\]"), None, 0, 4, 400, openings="[<")

    assert parts(text, boundaries) == [f"{'x' * 10}{'<' * 100}", f"<end>{'[' * 100}", "[end]"]


def test_a_segment_ends_in_front_of_a_token_where_one_is() -> None:
    """So that a change within a message moves no later segments."""
    one = parts("aaa <end>bbbb bbbb bbbb bbbb<end>cccc cccc")
    other = parts("aaa aa <end>bbbb bbbb bbbb bbbb<end>cccc cccc")

    assert one[1:] == other[1:]
    assert one[1].startswith("<end>")


def test_characters_that_are_not_encoded_stand_in_no_segment() -> None:
    """A space that the normalizer puts there again."""
    boundaries = Boundaries(None, re.compile("[a-z](?= [a-z])"), 1, least_characters=1, usual_characters=4)

    assert parts("aaaa bbbb cccc", boundaries) == ["aaaa", "bbbb", "cccc"]


def test_a_text_without_boundaries_is_searched_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies beyond it is one part, boundaries or not."""
    monkeypatch.setattr(module, "MOST_SEARCHED", 1_000)
    monkeypatch.setattr(module, "WINDOW_CHARACTERS", 100)
    searched: list[tuple[int, int]] = []

    class Pattern:
        def __init__(self, pattern: str) -> None:
            self._pattern = re.compile(pattern)

        def search(self, text: str, start: int, end: int) -> re.Match[str] | None:
            searched.append((start, end))
            return self._pattern.search(text, start, end)

    watched = Boundaries(None, Pattern("[a-z](?= )"), least_characters=4, usual_characters=12)  # type: ignore[arg-type]
    text = "." * 5_000 + "word word " * 100

    assert parts(text, watched) == [text]
    assert len(searched) == 10
    assert all(end - start <= 101 for start, end in searched)
