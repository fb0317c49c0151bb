"""The quality gate of KV kept in eight bits. The file is read once, at the start."""

from __future__ import annotations

from pathlib import Path

from shared.errors import ConfigError
from shared.quality_gate import KV_METHOD, QualityGate, read_gate


def read_kv_gate(path: Path) -> QualityGate:
    """Return the gate in ``path``, of any model.

    Raises ConfigError for no gate, one of another kind or a failed one.
    """
    gate = read_gate(path)
    if gate.method != KV_METHOD:
        raise ConfigError(
            f"{path}: the gate is of the method {gate.method}, and not of KV of eight bits; "
            "make one with thermocline eval --kv-dtype fp8"
        )
    for one in gate.ratios:
        if not one.passed:
            raise ConfigError(
                f"{path}: with KV of eight bits the model lost {one.drop_points:.2f} ± {one.standard_error_points:.2f} "
                f"points of accuracy on {gate.task}, and the limit is {gate.max_drop_points:g}"
            )
    if not gate.ratios:
        raise ConfigError(f"{path}: nothing was measured on {gate.task}")
    return gate
