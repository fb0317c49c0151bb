"""What a quality gate lets through, and which files are none for a deployment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.gateway.importance_gate import ImportanceGate, read_importance_gate
from shared.errors import ConfigError, InvalidRequest
from shared.messages.requests import Importance
from tests.unit.gateway.quality_gates import gate_file, gate_of
from tests.unit.gateway.running_gateway import FACTS

GATE = ImportanceGate(measured=gate_of(), metric="last_pooled")


def wanted(ratio: float = 0.25, **changes: Any) -> Importance:
    return Importance(ratio=ratio, metric="last_pooled", **changes)


def read(path: Path | str, *, probe_heads: int = 3, alpha: float = 0.6) -> ImportanceGate:
    return read_importance_gate(Path(path), model=FACTS.fingerprint, probe_heads=probe_heads, alpha=alpha)


@pytest.mark.parametrize("ratio", [0.3, 0.25])
def test_what_was_measured_and_passed_is_allowed(ratio: float) -> None:
    """So is any ratio above it."""
    GATE.check(wanted(ratio))


@pytest.mark.parametrize(
    ("importance", "param"),
    [
        (wanted(0.24), "cache.ratio"),
        (Importance(ratio=0.5, metric="last"), "cache.metric"),
        (wanted(first_tokens=1), "cache.first_tokens"),
        (wanted(recent_tokens=64), "cache.recent_tokens"),
    ],
)
def test_anything_else_is_refused(importance: Importance, param: str) -> None:
    """A smaller ratio, and any way to choose that was not measured; the error names the field."""
    with pytest.raises(InvalidRequest) as refusal:
        GATE.check(importance)

    assert (refusal.value.code, refusal.value.param, refusal.value.status) == ("importance_refused", param, 400)


@pytest.mark.parametrize(
    ("drops", "ratio", "said"),
    [
        ({0.5: 0.05, 0.25: 0.1, 0.1: 1.5}, 0.2, ["0.1 lost 1.50 ± 0.12", "limit is 0.2", "below 0.25"]),
        ({0.5: 0.05, 0.25: 0.9, 0.1: 1.5}, 0.2, ["0.1 lost 1.50"]),
        ({0.5: 0.05, 0.25: 0.9, 0.1: 1.5}, 0.05, ["0.25 lost 0.90"]),
        ({0.5: 0.05, 0.25: 0.9, 0.1: 0.1}, 0.1, ["0.25 lost 0.90"]),
        ({0.5: 0.05, 0.25: 0.1}, 0.1, ["0.25 lost 0.10", "limit is 0.2", "nothing smaller was measured"]),
        ({}, 0.5, ["nothing was measured on choosing"]),
    ],
)
def test_a_refusal_says_what_was_measured(drops: dict[float, float], ratio: float, said: list[str]) -> None:
    """The drop that speaks against the ratio, with its error, and the limit."""
    with pytest.raises(InvalidRequest) as refusal:
        ImportanceGate(measured=gate_of(drops), metric="last_pooled").check(wanted(ratio))

    assert all(part in refusal.value.message for part in said), refusal.value.message


def test_a_gate_is_read_for_its_model(tmp_path: Path) -> None:
    """With the metric of its method; without one it is what the evaluation takes then."""
    named = read(gate_file(tmp_path))
    unnamed = read(gate_file(tmp_path, method="importance"))

    assert named == GATE
    assert unnamed.metric == "h2o"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "another"}, "of model another, not of 0123"),
        ({"method": "random"}, "of the method random; evaluate one that is served: importance:h2o, "),
        ({"method": "h2o:last_pooled"}, "of the method h2o:last_pooled"),
        ({"method": "importance:novel"}, "of the method importance:novel"),
        ({"probe_heads": 4}, "measured with 4 probe heads"),
        ({"probe_unit": "query_head"}, "no quality gate: .*query_head"),
        ({"alpha": 0.5}, "alpha 0.5"),
    ],
)
def test_a_gate_of_anything_else_is_none(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Another model, method or identification than the cell's: its figures say nothing here."""
    with pytest.raises(ConfigError, match=message):
        read(gate_file(tmp_path, **changes))


def test_workers_with_other_settings_need_a_gate_of_their_own(tmp_path: Path) -> None:
    """One that was measured as they identify is good for them, and no longer for others."""
    path = gate_file(tmp_path, probe_heads=1, alpha=0.0)

    assert read(path, probe_heads=1, alpha=0.0).measured.alpha == 0
    with pytest.raises(
        ConfigError, match=r"measured with 1 probe heads .*, and workers find tokens with 3 probe heads"
    ):
        read(path)
