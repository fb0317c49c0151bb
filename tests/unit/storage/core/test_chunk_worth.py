"""Heat: uses that fade."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.storage.core.chunk_worth import HALF_LIFE_S, first_heat, heat_after_use


def test_a_use_fades_to_a_half_within_the_half_life() -> None:
    """Two uses one half-life ago are worth as much as one now."""
    then = heat_after_use(first_heat(0.0, 0.0), 0.0)

    assert then == pytest.approx(first_heat(0.0, HALF_LIFE_S))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -3.0, 0.0])
def test_hotness_that_is_no_number_counts_as_none(value: float) -> None:
    """An expression of an operator may yield anything."""
    assert first_heat(value, 0.0) == 0.0


@given(st.lists(st.floats(0, 1e7), min_size=1, max_size=20), st.floats(0, 1e7))
def test_heat_is_the_logarithm_of_faded_uses(times_s: list[float], now_s: float) -> None:
    """Whatever the order of the uses, it is the sum of what they are worth now."""
    start_s, *uses_s = sorted(times_s)
    heat = first_heat(0.0, start_s)
    for use_s in uses_s:
        heat = heat_after_use(heat, use_s)
    expected = sum(
        2.0 ** ((use_s - now_s) / HALF_LIFE_S) for use_s in times_s if abs(use_s - now_s) < HALF_LIFE_S * 900
    )

    if max(abs(use_s - now_s) for use_s in times_s) < HALF_LIFE_S * 900:
        assert 2.0 ** (heat - now_s / HALF_LIFE_S) == pytest.approx(expected, rel=1e-6)


def test_hotness_counts_on_a_logarithmic_scale() -> None:
    """A thousand times as hot is a few uses more, and never less."""
    heats = [first_heat(value, 0.0) for value in (0.0, 1.0, 10.0, 1e3, 1e6, 1e300)]

    assert heats == sorted(heats)
    assert 2.0 ** heats[-1] < 1000
