"""Distributions in bounded memory."""

from __future__ import annotations

from random import Random

import pytest

from thermocline.simulate.figures import Distribution


def test_quantiles_are_right_to_a_tenth_of_a_percent_and_the_mean_is_exact() -> None:
    """Against all values sorted, over five orders of magnitude."""
    rng = Random(3)
    values = [rng.lognormvariate(3, 2) for _ in range(20_000)]
    distribution = Distribution()
    for value in values:
        distribution.add(value)

    ordered = sorted(values)
    assert distribution.mean == pytest.approx(sum(values) / len(values))
    for fraction in (0.01, 0.5, 0.9, 0.99):
        assert distribution.quantile(fraction) == pytest.approx(ordered[int(fraction * len(values))], rel=1.1e-3)


def test_memory_does_not_grow_with_the_values() -> None:
    """A hundred thousand values of one decade take no more buckets than the decade has."""
    rng = Random(4)
    distribution = Distribution()
    for _ in range(100_000):
        distribution.add(10 ** (1 + rng.random()))

    assert len(distribution.buckets) < 1200


def test_no_values_and_zeroes() -> None:
    """Nothing counted is 0 everywhere, and a zero is a value."""
    assert Distribution().summary() == {"mean": 0.0, "p50": 0.0, "p99": 0.0}
    distribution = Distribution()
    distribution.add(0.0)
    assert distribution.quantile(0.5) == 0.0
