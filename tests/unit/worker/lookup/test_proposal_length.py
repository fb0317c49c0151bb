"""How long proposals are, by what became of earlier ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.worker.lookup.proposal_length import FIRST_ROWS, MOST_ROWS, STEPS_A_ROW, ProposalLength

MOST = 8


@given(steps=st.lists(st.tuples(st.integers(0, MOST), st.integers(0, MOST)), max_size=200))
def test_what_is_wasted_is_bounded(steps: list[tuple[int, int]]) -> None:
    """Rejected rows are never more than those at the start, one in so many steps, and what accepted ones earn."""
    length = ProposalLength(MOST)
    rejected = accepted = 0
    for wanted, right in steps:
        proposed = min(wanted, length.tokens)
        length.note(proposed, min(right, proposed))
        accepted += min(right, proposed)
        rejected += proposed - min(right, proposed)

    assert rejected <= FIRST_ROWS + len(steps) / STEPS_A_ROW + 2 * accepted
    assert 0 <= length.tokens <= MOST


def test_an_answer_that_copies_proposes_as_much_as_it_may() -> None:
    """Where all is accepted the length grows to its bound, and stays there."""
    length = ProposalLength(MOST)
    proposed = []
    for _ in range(8):
        proposed.append(length.tokens)
        length.note(length.tokens, length.tokens)

    assert proposed == sorted(proposed)
    assert proposed[-1] == MOST


def test_an_answer_that_copies_nothing_soon_proposes_next_to_nothing() -> None:
    """Where nothing is accepted one row is tried in so many steps."""
    length = ProposalLength(MOST)
    proposed = []
    for _ in range(20 * STEPS_A_ROW):
        proposed.append(length.tokens)
        length.note(length.tokens, 0)

    assert sum(proposed) <= FIRST_ROWS + 20
    assert max(proposed[STEPS_A_ROW:]) == 1


def test_the_length_follows_what_is_right() -> None:
    """A proposal that was right in part is followed by one as long as that part."""
    length = ProposalLength(MOST)
    while length.tokens < MOST:
        length.note(length.tokens, length.tokens)
    length.note(MOST, 3)

    assert length.tokens == 3


def test_what_was_earned_does_not_pile_up() -> None:
    """A long answer that stops copying has no more rows to waste than a short one."""
    length = ProposalLength(MOST)
    for _ in range(1000):
        length.note(MOST, MOST)
    wasted = 0
    while wasted <= 2 * MOST_ROWS and length.tokens > 1:
        wasted += length.tokens
        length.note(length.tokens, 0)

    assert wasted <= MOST_ROWS
