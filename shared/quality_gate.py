"""The outcome of a quality evaluation, as a file that a deployment can demand before it loads prefixes lossily.

It tells for one model and one way of choosing tokens how many percentage points of accuracy each retention ratio cost,
and which were within the limit. A model with any other byte has another fingerprint and needs an evaluation of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from shared.errors import ConfigError
from shared.undecodable import UNDECODABLE

KV_METHOD = "kv_fp8"
"""Method of a gate for whole prefixes whose KV is kept in eight bits."""


UNMEASURED = "unmeasured"
"""Value of ``--kv-gate`` in the place of a file where a deployment serves without a measurement."""


class GatedRatio(msgspec.Struct, frozen=True, kw_only=True):
    """One ratio: the drop against the whole prefix with its standard error, both in percentage points."""

    ratio: float
    drop_points: float
    standard_error_points: float
    passed: bool


class QualityGate(msgspec.Struct, frozen=True, kw_only=True, tag="quality_gate_1"):
    """The result of an evaluation. ``model`` is the model's fingerprint.

    ``method`` is how tokens were chosen, with its settings. ``ratios`` are in descending order.
    """

    model: str
    dtype: str
    task: str
    task_digest: str
    questions: int
    method: str
    probe_heads: int
    probe_unit: Literal["kv_head"] = "kv_head"  # Gates of other voters, which 0.2 could measure, are refused.
    alpha: float
    first_tokens: int
    recent_tokens: int
    max_drop_points: float
    ratios: tuple[GatedRatio, ...]

    @property
    def least_ratio(self) -> float:
        """Smallest ratio that passed together with all larger measured ones; 1 if none did."""
        least = 1.0
        for measured in self.ratios:
            if not measured.passed:
                break
            least = measured.ratio
        return least


def require(gate: QualityGate, *, model: str, ratio: float) -> None:
    """Raise ConfigError unless ``gate`` allows this model to load ``ratio`` of a prefix."""
    if gate.model != model:
        raise ConfigError(f"the quality gate is of model {gate.model}, not of {model}; evaluate this model")
    if ratio < gate.least_ratio:
        raise ConfigError(
            f"the quality gate allows no ratio below {gate.least_ratio:g} "
            f"(at most {gate.max_drop_points:g} points of accuracy lost on {gate.task}), and {ratio:g} was asked for"
        )


def write_gate(gate: QualityGate, path: Path) -> None:
    """Write the gate as JSON. Raises ConfigError when the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(gate)) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write the quality gate {path}: {error.strerror}") from error


def read_gate(path: Path) -> QualityGate:
    """Return the gate in a file. Raises ConfigError when it cannot be read or is not a quality gate."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=QualityGate)
    except OSError as error:
        raise ConfigError(f"cannot read the quality gate {path}: {error.strerror}") from error
    except UNDECODABLE as error:
        raise ConfigError(f"{path} is no quality gate: {error}") from error
