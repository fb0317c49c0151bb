"""The simple rules: which of two prefixes goes first, one at a time and many at once."""

from __future__ import annotations

import numpy as np
import pytest

from services.scheduler.policies.thermo.law import COUNT_SHIFT, PASSED_SHIFT, Law
from services.scheduler.policies.thermo.rules import (
    FADING,
    FREQUENCY,
    LASTING,
    MOST_USES,
    RECENCY,
    ROUNDS,
    RULES,
    order_keys,
    score,
    score_one,
)

FOUR_YEARS_S = 4 * 365 * 86400.0


def code(uses: int, passed: int = 0, pace: int = 0) -> int:
    """The part of a code that simple rules look at."""
    return uses << COUNT_SHIFT | passed << PASSED_SHIFT | pace


def first(rule: int, now: float, one: tuple[float, int], other: tuple[float, int]) -> tuple[float, int]:
    """Of two (last, code), the one that goes first."""
    return min(one, other, key=lambda prefix: score_one(rule, now, prefix[0], prefix[1], Law()))


@pytest.mark.parametrize("rule", range(RULES))
def test_many_at_once_score_as_one_by_one(rule: int) -> None:
    """To the last bit, so that it does not matter which way a score was found."""
    lasts = np.array([0.0, 1.5, 1e4 + 1 / 3, FOUR_YEARS_S])
    codes = np.array([code(1), code(7, passed=1), code(MOST_USES, pace=31), code(3, pace=12)])

    scores = score(rule, FOUR_YEARS_S + 1.0, lasts, codes, Law())

    assert scores.tolist() == [
        score_one(rule, FOUR_YEARS_S + 1.0, last, prefix, Law())
        for last, prefix in zip(lasts.tolist(), codes.tolist(), strict=True)
    ]


def test_order_of_each_rule() -> None:
    """Recency: the older; frequency: the less used, then the older; rounds: the less used, then the newer."""
    old, new, used = (10.0, code(1)), (20.0, code(1)), (5.0, code(2))

    assert first(RECENCY, 30.0, old, new) is old
    assert first(RECENCY, 30.0, used, old) is used
    assert first(FREQUENCY, 30.0, old, new) is old
    assert first(ROUNDS, 30.0, old, new) is new
    assert first(FREQUENCY, 30.0, used, new) is new
    assert first(ROUNDS, 30.0, used, old) is old


@pytest.mark.parametrize("rule", [FREQUENCY, ROUNDS])
def test_a_use_outweighs_any_time_and_a_millisecond_still_counts(rule: int) -> None:
    """At the greatest number of uses and after years, the two parts of a score do not mix."""
    late, later = (FOUR_YEARS_S, code(MOST_USES - 1)), (FOUR_YEARS_S + 0.001, code(MOST_USES - 1))

    assert first(rule, FOUR_YEARS_S, late, (0.0, code(MOST_USES))) is late
    assert first(rule, FOUR_YEARS_S, late, later) is (late if rule == FREQUENCY else later)


@pytest.mark.parametrize("rule", [FREQUENCY, ROUNDS])
def test_what_was_passed_by_goes_before_what_was_not(rule: int) -> None:
    """However often it was used before."""
    passed = (20.0, code(50, passed=1))

    assert first(rule, 30.0, passed, (10.0, code(1))) is passed


@pytest.mark.parametrize("rule", [FREQUENCY, ROUNDS, FADING, LASTING])
def test_where_a_prefix_goes_on_in_many_ways_its_uses_count(rule: int) -> None:
    """Examples in a tree are asked for in any order: that another branch was taken does not make one worth nothing."""
    other = (20.0, code(50, passed=2))

    assert first(rule, 30.0, other, (20.0, code(3))) != other


def test_uses_fade_by_half_in_every_half_life() -> None:
    """Turnovers take 10 s: four uses are worth one after two of them, or after eight where they last."""
    used = (0.0, code(4))

    assert score_one(FADING, 20.0, *used, Law(), 10.0) == 1.0 == score_one(FADING, 20.0, 20.0, code(1), Law(), 10.0)
    assert score_one(LASTING, 80.0, *used, Law(), 10.0) == 1.0


def test_uses_far_apart_do_not_add_up() -> None:
    """A thousand uses once in ten half-lives are hardly worth more than one; a thousand in quick turn are."""
    seldom, often = code(1000, pace=18), code(1000, pace=5)  # About 98 s, and 12 ms.

    assert score_one(FADING, 0.0, 0.0, seldom, Law(), 9.8) == pytest.approx(1.0, rel=0.01)
    assert score_one(FADING, 0.0, 0.0, often, Law(), 9.8) > 500


@pytest.mark.parametrize("rule", [RECENCY, FREQUENCY, ROUNDS, FADING, LASTING])
def test_order_keys_are_in_the_order_of_scores(rule: int) -> None:
    """At any time."""
    prefixes = [(float(number * 37 % 11), code(1 + number % 3)) for number in range(11)]

    lasts, codes = np.array([last for last, _ in prefixes]), np.array([uses for _, uses in prefixes])
    keys = order_keys(rule, lasts, codes, 5.0)

    assert [prefixes[place] for place in np.argsort(keys, kind="stable")] == sorted(
        prefixes, key=lambda prefix: score_one(rule, 60.0, prefix[0], prefix[1], Law(), 5.0)
    )
