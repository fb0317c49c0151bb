"""How wrong predictions were."""

import pytest

from services.scheduler.core.hidden.planner import Copy, PredictionErrors, Span, note_restoration, plan_restoration
from services.scheduler.core.hidden.planner.prediction_error import MOST_KINDS, OTHER, plan_kind
from tests.unit.scheduler.core.hidden.planner.cases import costs, held, resources


def test_bias_and_magnitude_are_apart():
    """Too long and too short by as much have little bias and the full magnitude."""
    errors = PredictionErrors()
    for number in range(100):
        note_restoration(errors, "kv from host", 100.0, 120.0 if number % 2 else 80.0)
    found = errors.by_kind["kv from host"]

    assert found.observations == 100
    assert abs(found.bias) < 0.02
    assert found.magnitude == pytest.approx(0.2)


def test_the_first_observation_counts_in_full_and_then_fades():
    """A change of the machine shows within some tens of restorations."""
    errors = PredictionErrors()
    note_restoration(errors, "tokens", 100.0, 150.0)
    first = errors.by_kind["tokens"].bias
    for _ in range(50):
        note_restoration(errors, "tokens", 100.0, 100.0)

    assert first == 0.5
    assert errors.by_kind["tokens"].magnitude < 0.01


@pytest.mark.parametrize(
    ("predicted", "observed"), [(0, 10), (-5, 10), (10, -1), (float("nan"), 1), (10, float("inf"))]
)
def test_what_cannot_be_is_not_counted(predicted, observed):
    """A prediction of nothing has no relative error."""
    errors = PredictionErrors()
    note_restoration(errors, "tokens", predicted, observed)

    assert errors == PredictionErrors()


def test_kinds_are_bounded():
    """What comes after so many kinds is counted together."""
    errors = PredictionErrors()
    for number in range(MOST_KINDS + 10):
        note_restoration(errors, f"kv from {number}", 100.0, 110.0)

    assert len(errors.by_kind) == MOST_KINDS + 1
    assert errors.by_kind[OTHER].observations == 10


def test_a_plan_is_named_by_what_it_mixes():
    """Methods with their sources, in order of the alphabet; what is on the device does not count."""
    cost, resource = costs(4), resources()
    device = Span(tokens=10, device=0b1111)
    mixed = [device, held(4, "hidden", source="disk"), Span(tokens=10, copies=(Copy("host", "kv", 0b1111),))]

    assert plan_kind(plan_restoration([device], cost, resource)) == "device"
    kind = plan_kind(plan_restoration(mixed, costs(4, token_us=1e6), resource, first_layers=False))
    assert kind == "hidden from disk + kv from host"
