"""Ratios say what a paper says, or not."""

from __future__ import annotations

from math import inf

import pytest

from tools.pages.ratios import counted, judged, over, ratio


def test_a_ratio_of_nothing_is_told_apart_from_a_ratio_to_nothing() -> None:
    """0 over 0 is 1; anything else over 0 is infinite."""
    assert ratio(0, 0) == 1
    assert ratio(3, 0) == inf


def test_every_name_is_divided_by_every_other_in_each_row() -> None:
    """Figures themselves, or one figure of what stands under the names."""
    flat = [{"a": 6.0, "b": 3.0, "c": 2.0}]
    nested = [{"slow": {"s": 10.0}, "fast": {"s": 5.0}}, {"slow": {"s": 9.0}, "fast": {"s": 3.0}}]

    assert over(flat, "a", ("b", "c")) == [2.0, 3.0]
    assert over(flat, ("a", "b"), "c") == [3.0, 1.5]
    assert over(nested, "slow", "fast", "s") == [2.0, 3.0]


def test_a_direction_is_the_papers_only_where_every_ratio_is_above_one() -> None:
    """All is yes, some is partly, none is no; without a ratio there is no direction."""
    assert judged([1.2, 1.01]) == "yes"
    assert judged([1.2, 1.0]) == "partly"
    assert judged([1.0, 0.9]) == "no"
    with pytest.raises(ValueError, match="a ratio at least"):
        judged([])


def test_a_count_says_in_how_many_cases_a_claim_holds() -> None:
    """All above 1 is yes, some is a count, none is no, and what lies within the tolerance is no difference."""
    assert counted([1.2, 1.01]) == "yes"
    assert counted([1.2, 1.001, 0.9]) == "in 1 of 3"
    assert counted([0.9, 1.001]) == "no"
    assert counted([0.998, 1.004]) == "no difference"
