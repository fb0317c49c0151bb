"""Drops and their errors."""

from __future__ import annotations

import pytest

from thermocline.evaluation.figures import Outcome, accuracy_error_points, compare, drop_error_points


def outcomes(*right: bool, log_probability: float = -1.0, read: float = 1.0) -> list[Outcome]:
    return [Outcome(one, log_probability, read, 0.5) for one in right]


def test_a_drop_is_what_was_lost_less_what_was_gained() -> None:
    """In percentage points of all questions, with averages of the rest."""
    whole = outcomes(True, True, True, False)
    part = outcomes(True, False, False, True, log_probability=-1.5, read=0.6)

    figure = compare("importance", 0.25, whole, part, 2.0)

    assert (figure.lost, figure.gained, figure.drop_points, figure.accuracy) == (2, 1, 25.0, 0.5)
    assert (figure.nats_lost, figure.read, figure.fallbacks) == pytest.approx((0.5, 0.6, 0.5))


def test_two_points_in_a_thousand_show_in_two_thousand_questions() -> None:
    """Where at most fifteen answers change, the error of a drop stays within 0.2 points; an accuracy's own does not."""
    assert drop_error_points(10, 5, 2000) == pytest.approx(0.2)
    assert accuracy_error_points(0.95, 2000) == pytest.approx(0.487, abs=1e-3)


def test_nothing_changed_is_no_certainty() -> None:
    """An error remains, and shrinks with the number of questions."""
    assert [drop_error_points(0, 0, count) for count in (20, 2000)] == [5.0, 0.05]
