"""How wrong predictions were."""

import pytest

from services.scheduler.core.speed_fit import (
    MOST_KINDS,
    OTHER,
    PredictionErrors,
)


def test_bias_and_magnitude_are_apart() -> None:
    """Too long and too short by as much have little bias and the full magnitude."""
    errors = PredictionErrors()
    for number in range(100):
        errors.note("kv from host", 100.0, 120.0 if number % 2 else 80.0)
    found = errors.by_kind["kv from host"]

    assert found.observations == 100
    assert abs(found.bias) < 0.02
    assert found.magnitude == pytest.approx(0.2)


def test_the_first_observation_counts_in_full_and_then_fades() -> None:
    """A change of the machine shows within some tens of restorations."""
    errors = PredictionErrors()
    errors.note("tokens", 100.0, 150.0)
    first = errors.by_kind["tokens"].bias
    for _ in range(50):
        errors.note("tokens", 100.0, 100.0)

    assert first == 0.5
    assert errors.by_kind["tokens"].magnitude < 0.01


@pytest.mark.parametrize(
    ("predicted", "observed"), [(0, 10), (-5, 10), (10, -1), (float("nan"), 1), (10, float("inf"))]
)
def test_what_cannot_be_is_not_counted(predicted: float, observed: float) -> None:
    """A prediction of nothing has no relative error."""
    errors = PredictionErrors()
    errors.note("tokens", predicted, observed)

    assert errors == PredictionErrors()


def test_kinds_are_bounded() -> None:
    """What comes after so many kinds is counted together."""
    errors = PredictionErrors()
    for number in range(MOST_KINDS + 10):
        errors.note(f"kv from {number}", 100.0, 110.0)

    assert len(errors.by_kind) == MOST_KINDS + 1
    assert errors.by_kind[OTHER].observations == 10
