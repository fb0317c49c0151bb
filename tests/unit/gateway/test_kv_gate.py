"""What a gateway asks of a quality gate before it serves KV of eight bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.gateway.bootstrap import check_kv
from services.gateway.checks import check
from services.gateway.config import GatewayConfig
from shared.errors import ConfigError
from shared.quality_gate import KV_METHOD, UNMEASURED
from tests.unit.gateway.quality_gates import gate_file
from tests.unit.gateway.running_gateway import FACTS

MODEL = Path(__file__).parents[3] / "models" / "thermocline-mha"


def config(gate: str, **changes: Any) -> GatewayConfig:
    return msgspec.convert({"model": str(MODEL), "kv_dtype": "fp8", "kv_gate": gate, **changes}, GatewayConfig)


def test_a_gate_of_this_model_that_passed_is_enough(tmp_path: Path) -> None:
    """Neither the check before the start nor the one at the start raises."""
    settings = config(gate_file(tmp_path, {1.0: 0.05}, method=KV_METHOD))

    check(settings)
    check_kv(settings, FACTS.fingerprint)


def test_what_was_not_measured_is_served_where_that_is_said() -> None:
    """Without a file, and for any model."""
    check(config(UNMEASURED))
    check_kv(config(UNMEASURED), FACTS.fingerprint)


@pytest.mark.parametrize(
    ("drops", "changes", "said"),
    [
        ({1.0: 0.5}, {}, "lost 0.50 ± 0.12 points of accuracy on choosing, and the limit is 0.2"),
        ({}, {}, "nothing was measured"),
        ({1.0: 0.0}, {"method": "importance:h2o"}, "of the method importance:h2o"),
    ],
)
def test_another_gate_stops_the_gateway_before_its_start(
    drops: dict[float, float], changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """The message says what was measured."""
    with pytest.raises(ConfigError, match=said):
        check(config(gate_file(tmp_path, drops, **({"method": KV_METHOD} | changes))))


def test_a_gate_of_another_model_stops_the_gateway(tmp_path: Path) -> None:
    """The fingerprint is that of the model with such KV, so one of the model with other KV is another."""
    settings = config(gate_file(tmp_path, {1.0: 0.0}, method=KV_METHOD, model="another"))

    with pytest.raises(ConfigError, match="evaluate this model"):
        check_kv(settings, FACTS.fingerprint)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kv_gate": ""}, "give --kv-gate FILE, measured with this model"),
        ({"kv_dtype": "auto"}, "--kv-gate needs --kv-dtype fp8"),
        ({"importance": "on"}, "--importance on: KV of eight bits cannot be loaded in part"),
    ],
)
def test_settings_that_contradict_one_another_are_named(settings: dict[str, str], said: str) -> None:
    """Before anything is read."""
    with pytest.raises(msgspec.ValidationError, match=said):
        config("gate.json", **settings)
