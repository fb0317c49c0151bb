"""How long proposals are, by what became of earlier ones and by what rows cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.lookup.proposal_length import (
    ALLOWANCE,
    FIRST_BALANCE,
    MOST_BALANCE,
    TOKEN,
    ProposalLength,
    row_cost,
)

MOST = 8
COST = 100


@given(
    steps=st.lists(st.tuples(st.integers(0, MOST), st.integers(0, MOST)), max_size=200), cost=st.integers(40, 2 * TOKEN)
)
def test_what_is_lost_is_bounded(steps: list[tuple[int, int]], cost: int) -> None:
    """Rows never cost more than what was given at the start and at every step, and what accepted ones have spared."""
    length = ProposalLength(MOST)
    spent = spared = 0
    for wanted, right in steps:
        proposed = min(wanted, length.tokens(cost))
        length.note(proposed, min(right, proposed), cost)
        spent += proposed * cost
        spared += min(right, proposed) * TOKEN

        assert 0 <= length.tokens(cost) <= MOST

    assert spent <= FIRST_BALANCE + ALLOWANCE * len(steps) + spared


def test_an_answer_that_copies_proposes_as_much_as_it_may() -> None:
    """Where all is accepted the length grows to its bound, and stays there."""
    length = ProposalLength(MOST)
    proposed = []
    for _ in range(8):
        proposed.append(length.tokens(COST))
        length.note(proposed[-1], proposed[-1], COST)

    assert proposed == sorted(proposed)
    assert proposed[-1] == MOST


@pytest.mark.parametrize("cost", [40, 100, 400])
def test_an_answer_that_copies_nothing_soon_proposes_next_to_nothing(cost: int) -> None:
    """Where nothing is accepted rows take what is allowed, so the dearer they are the fewer."""
    length, steps = ProposalLength(MOST), 1000
    proposed = []
    for _ in range(steps):
        proposed.append(length.tokens(cost))
        length.note(proposed[-1], 0, cost)

    allowed = (FIRST_BALANCE + ALLOWANCE * steps) / cost
    assert allowed - 2 <= sum(proposed) <= allowed
    assert max(proposed[250:]) == 1


def test_the_length_follows_what_is_right() -> None:
    """A proposal that was right in part is followed by one as long as that part."""
    length = ProposalLength(MOST)
    while length.tokens(COST) < MOST:
        length.note(length.tokens(COST), length.tokens(COST), COST)
    length.note(MOST, 3, COST)

    assert length.tokens(COST) == 3


def test_what_was_earned_does_not_pile_up() -> None:
    """A long answer that stops copying has no more to lose than a short one."""
    length = ProposalLength(MOST)
    for _ in range(1000):
        length.note(MOST, MOST, COST)
    spent = 0
    while length.tokens(COST) and spent <= 2 * MOST_BALANCE:
        spent += length.tokens(COST) * COST
        length.note(length.tokens(COST), 0, COST + ALLOWANCE)

    assert spent <= MOST_BALANCE


def test_rows_cost_what_they_read() -> None:
    """Behind few tokens a row is nearly free, behind as many as the weights weigh it is two thirds of a step."""
    assert row_cost(0, 1 << 20, 1) == 40
    assert row_cost(1 << 20, 2 << 20, 1) == 665


def test_a_token_is_worth_less_beside_others() -> None:
    """A token that one of eight requests need not wait for spares an eighth of a step, so rows are dear there."""
    assert row_cost(0, 1 << 20, 8) == 8 * row_cost(0, 1 << 20, 1)
