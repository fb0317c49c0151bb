"""How many tokens are chosen, which ones, and how ties end."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.importance.selection import Budget, most_important, tokens_loaded, vote
from shared.errors import ConfigError


@pytest.mark.parametrize(
    ("ratio", "tokens", "count"), [(0.25, 100, 25), (0.07, 100, 7), (0.1, 101, 11), (0.001, 5, 1), (1.0, 64, 64)]
)
def test_the_ratio_is_rounded_up(ratio: float, tokens: int, count: int) -> None:
    """Never fewer than asked for, and never one more because of rounding errors."""
    assert Budget(ratio).over(0, tokens).count == count


def test_kept_tokens_count_towards_the_ratio() -> None:
    """Ten of forty: two first, three recent, and five that are chosen among the rest."""
    choice = Budget(0.25, first_tokens=2, recent_tokens=3).over(0, 40)

    assert choice.kept.tolist() == [0, 1, 37, 38, 39]
    assert choice.count == 5
    assert choice.candidates.tolist() == list(range(2, 37))
    assert choice.with_kept(torch.tensor([4, 9])).tolist() == [0, 1, 4, 9, 37, 38, 39]


def test_kept_tokens_may_exceed_the_ratio() -> None:
    """They are kept in any case, and nothing is added."""
    choice = Budget(0.1, first_tokens=4, recent_tokens=50).over(0, 20)

    assert (choice.count, choice.kept.tolist()) == (0, list(range(20)))


def test_kept_tokens_do_not_exceed_the_room() -> None:
    """Where only so many tokens can be held, the first ones are kept, then the most recent."""
    choice = Budget(0.25, first_tokens=3, recent_tokens=50, most_tokens=5).over(0, 20)

    assert (choice.count, choice.kept.tolist()) == (0, [0, 1, 2, 18, 19])
    assert Budget(0.25, first_tokens=9, recent_tokens=50, most_tokens=5).over(0, 20).kept.tolist() == [0, 1, 2, 3, 4]


@given(
    ratio=st.floats(0.01, 1.0),
    start=st.integers(0, 50),
    tokens=st.integers(1, 200),
    hidden=st.integers(0, 200),
    first=st.integers(0, 60),
    recent=st.integers(0, 60),
)
def test_a_choice_fits_into_what_the_whole_prefix_may_take(
    ratio: float, start: int, tokens: int, hidden: int, first: int, recent: int
) -> None:
    """However much a window hides of it, and whatever is kept regardless."""
    room = tokens_loaded(ratio, tokens)
    visible = start + min(hidden, tokens - 1)

    choice = Budget(ratio, first, recent, room).over(visible, start + tokens)

    assert 0 < choice.count + len(choice.kept) <= room
    assert set(choice.kept.tolist()).isdisjoint(choice.candidates.tolist())
    assert len(choice.kept) + len(choice.candidates) == start + tokens - visible


def test_first_tokens_are_those_of_the_prefix() -> None:
    """A window that begins behind them leaves none, and of a later part of the request some may be left."""
    assert Budget(0.5, first_tokens=4).over(10, 20).kept.tolist() == []
    assert Budget(0.5, first_tokens=12).over(10, 20).kept.tolist() == [10, 11]


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.01])
def test_a_ratio_that_is_none_is_refused(ratio: float) -> None:
    """Nothing and more than everything cannot be loaded."""
    with pytest.raises(ConfigError, match="ratio"):
        Budget(ratio)


def test_of_equal_scores_the_lower_index_wins() -> None:
    """The result is sorted and does not depend on the sort's mood."""
    scores = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]])

    assert most_important(scores, 2).tolist() == [[1, 2], [0, 1]]


def test_votes_come_before_scores() -> None:
    """Two heads outvote one that is surer; among equal votes the sum of scores decides, then the index."""
    scores = torch.tensor([[0.3, 0.2, 0.0, 0.0, 0.0], [0.3, 0.0, 0.2, 0.0, 0.0], [0.0, 0.0, 0.0, 9.0, 8.0]])
    sets = most_important(scores, 2)

    assert vote(sets, scores).tolist() == [0, 3]
    assert vote(torch.tensor([[1, 2]]), torch.zeros(1, 5)).tolist() == [1, 2]
