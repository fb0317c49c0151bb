"""Speeds of links, learned from transfers."""

import pytest

from services.scheduler.core.speed_fit import Rate


def test_nothing_observed_is_the_default() -> None:
    """Before the first transfer the caller's figure stands."""
    assert Rate().per_us(7.0) == 7.0


def test_the_rate_is_what_was_observed() -> None:
    """Bytes over time, long transfers counting for more."""
    rate = Rate()
    rate.note(1000, 100)
    rate.note(10_000, 1000)

    assert rate.per_us(7.0) == pytest.approx(10)


def test_a_disk_that_slows_down_is_noticed_within_some_tens_of_transfers() -> None:
    """What was known fades exponentially."""
    rate = Rate()
    for _ in range(50):
        rate.note(1000, 100)
    for _ in range(40):
        rate.note(1000, 400)

    assert rate.per_us(7.0) == pytest.approx(2.5, rel=0.02)


def test_one_pause_is_not_a_slow_disk() -> None:
    """A transfer a thousand times too long counts as eight times."""
    rate = Rate()
    for _ in range(20):
        rate.note(1000, 100)
    rate.note(1000, 100_000)

    assert rate.per_us(7.0) > 5


@pytest.mark.parametrize(
    ("amount", "elapsed_us"), [(0, 10), (10, 0), (-1, 10), (10, -1), (float("nan"), 1), (1, float("inf"))]
)
def test_what_cannot_be_teaches_nothing(amount: float, elapsed_us: float) -> None:
    """Zero and negative amounts and times leave it as it is."""
    rate = Rate()
    rate.note(amount, elapsed_us)

    assert rate == Rate()
