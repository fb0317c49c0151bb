"""Where the end of a text has occurred before."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.lookup.ngram_index import LENGTHS, MOST_SLOT_BITS, NgramIndex
from services.worker.token_sequence import TokenSequence


def followed(tokens: Sequence[int], most: int) -> tuple[int, ...]:
    """The continuation by looking at every place, the latest first."""
    known = list(tokens)
    for length in LENGTHS:
        if len(known) < length:
            continue
        for found in range(len(known) - 1, length - 1, -1):
            if known[found - length : found] == known[len(known) - length :]:
                while len(known) < found + most:
                    known.append(known[found + len(known) - len(tokens)])
                return tuple(known[found : found + most])
    return ()


@given(
    prompt=st.lists(st.integers(0, 3), max_size=24),
    answer=st.lists(st.integers(0, 3), max_size=24),
    most=st.integers(1, 9),
)
def test_the_latest_occurrence_of_the_longest_ngram_is_continued(
    prompt: list[int], answer: list[int], most: int
) -> None:
    """Whatever was indexed at once and whatever token by token: what is proposed is what a search of the text finds."""
    tokens = TokenSequence(prompt)
    index = NgramIndex(tokens, expected=100_000)

    for token in answer:
        assert index.continuation(most) == followed(tokens, most)
        tokens.append(token)
    assert index.continuation(most) == followed(tokens, most)


@given(tokens=st.lists(st.integers(0, 2**31 - 1), max_size=40), cuts=st.lists(st.integers(0, 40), max_size=5))
def test_how_a_text_was_indexed_does_not_matter(tokens: list[int], cuts: list[int]) -> None:
    """At once, or in any pieces: the tables are the same, for every token id that there is."""
    grown, whole = TokenSequence([]), NgramIndex(tokens, expected=1)
    index = NgramIndex(grown, expected=1)
    whole.continuation(1)
    for place, token in enumerate(tokens):
        if place in cuts:
            index.continuation(1)
        grown.append(token)
    index.continuation(1)

    assert all((index._tables[length] == whole._tables[length]).all() for length in LENGTHS)


def test_a_loop_goes_on() -> None:
    """What reaches the end of the text is repeated."""
    assert NgramIndex([9, 1, 2, 3, 1, 2, 3, 1, 2], expected=9).continuation(7) == (3, 1, 2, 3, 1, 2, 3)


@pytest.mark.parametrize("text", [[], [1], [1, 2], [1, 2, 3, 4, 5, 6]])
def test_a_text_without_repetition_is_not_continued(text: list[int]) -> None:
    """Nothing is proposed where the last two tokens have not occurred before."""
    assert NgramIndex(text, expected=6).continuation(4) == ()


def test_two_ngrams_in_one_slot_propose_nothing_wrong() -> None:
    """A slot is believed only as far as the tokens before it are the same."""
    index = NgramIndex([5, 6, 7, 8, 9], expected=1)
    index.continuation(1)
    for table in index._tables.values():
        table[:] = 3

    assert index.continuation(1) == ()


def test_memory_is_bounded() -> None:
    """Tables do not grow with a text beyond their bound."""
    index = NgramIndex(TokenSequence(range(200_000)), expected=1_000_000)
    index.continuation(1)

    assert sum(table.nbytes for table in index._tables.values()) == len(LENGTHS) * 4 << MOST_SLOT_BITS
