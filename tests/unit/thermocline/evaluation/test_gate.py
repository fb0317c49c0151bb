"""When a ratio passes, and what is said when it does not."""

from __future__ import annotations

from math import nan

import pytest

from tests.unit.thermocline.evaluation.made_figures import evaluation, figure
from thermocline.evaluation.gate import faults, judge
from thermocline.evaluation.report import table

FOUND = evaluation(
    figure(0.1, drop=1.5),
    figure(0.5, drop=-0.05),
    figure(0.25, drop=0.2),
    figure(0.5, drop=9.0, method="random"),
)


def test_a_drop_within_the_limit_passes() -> None:
    """The limit itself is within; a gain passes too; other methods do not matter."""
    gate = judge(FOUND, "importance", 0.2)

    assert [(one.ratio, one.passed) for one in gate.ratios] == [(0.5, True), (0.25, True), (0.1, False)]
    assert gate.least_ratio == 0.25


def test_a_ratio_that_exceeds_is_named() -> None:
    """One line for each, with drop and limit."""
    assert faults(FOUND, "importance", 0.2) == ["importance at ratio 0.1 drops 1.50 points, more than 0.2"]
    assert faults(FOUND, "importance", 2.0) == []


def test_too_few_questions_do_not_pass() -> None:
    """A drop that was measured more coarsely than the limit may as well be beyond it."""
    coarse = evaluation(figure(0.5, drop=0.0, error=5.0))

    (fault,) = faults(coarse, "importance", 0.2)

    assert "too few questions to tell" in fault
    assert not judge(coarse, "importance", 0.2).ratios[0].passed


@pytest.mark.parametrize(("drop", "error"), [(nan, 0.1), (0.0, nan)])
def test_what_is_no_number_does_not_pass(drop: float, error: float) -> None:
    """A comparison with it is false, whichever way it is asked; so is every one with such a limit."""
    unknown = evaluation(figure(0.5, drop=drop, error=error))

    assert len(faults(unknown, "importance", 0.2)) == 1
    assert not judge(unknown, "importance", 0.2).ratios[0].passed
    assert len(faults(FOUND, "importance", nan)) == 3


def test_the_table_has_a_row_for_everything() -> None:
    """The whole prefix first, then methods and ratios in their order."""
    lines = table(FOUND).splitlines()

    assert lines[0] == "m on documents: 2000 questions over 40 prefixes of 1018 tokens on average; guessing gives 25%"
    assert [line.split()[:2] for line in lines[3:8]] == [
        ["whole", "prefix"],
        ["importance", "10%"],
        ["importance", "50%"],
        ["importance", "25%"],
        ["random", "50%"],
    ]
