"""What callers may ask for under a quality gate. The file is read once, at the start; checks are pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError, InvalidRequest
from shared.importance import METRICS
from shared.messages.requests import Importance
from shared.quality_gate import QualityGate, read_gate, require

SERVED_METHOD = "importance"
"""The method by which workers load, among those that ``thermocline eval`` compares."""

UNNAMED_METRIC = "h2o"
"""The metric that ``thermocline eval`` uses for ``importance`` without a metric."""

REFUSED = "importance_refused"


@dataclass(frozen=True, slots=True)
class ImportanceGate:
    """A gate of the served model, measured as its cell loads. ``metric`` is that of its method."""

    measured: QualityGate
    metric: str

    def check(self, wanted: Importance) -> None:
        """Raise InvalidRequest for a setting that was not measured, and for a ratio measured to lose too much."""
        gate = self.measured
        if wanted.metric != self.metric:
            raise InvalidRequest(
                f"this deployment allows only the metric {self.metric}, with which its quality was measured, "
                f"not {wanted.metric}",
                param="cache.metric",
                code=REFUSED,
            )
        for name in ("first_tokens", "recent_tokens"):
            asked, known = getattr(wanted, name), getattr(gate, name)
            if asked != known:
                raise InvalidRequest(
                    f"quality was measured with {name} {known}, and this deployment allows no other; {asked} was "
                    "asked for",
                    param=f"cache.{name}",
                    code=REFUSED,
                )
        if wanted.ratio < gate.least_ratio:
            raise InvalidRequest(
                f"this deployment allows no ratio below {gate.least_ratio:g}, and {wanted.ratio:g} was asked for: "
                f"{_evidence(gate, wanted.ratio)}",
                param="cache.ratio",
                code=REFUSED,
            )


def read_importance_gate(path: Path, *, model: str, probe_heads: int, alpha: float) -> ImportanceGate:
    """Return the gate in ``path`` for the model with this fingerprint, whose workers have these settings.

    Raises ConfigError for a file that is no gate, is of another model, or was measured with another way to choose
    tokens.
    """
    gate = read_served_gate(path, probe_heads=probe_heads, alpha=alpha)
    require(gate.measured, model=model, ratio=1.0)
    return gate


def read_served_gate(path: Path, *, probe_heads: int, alpha: float) -> ImportanceGate:
    """Return the gate in ``path`` for any model, without the fingerprint that needs its weights read.

    Raises ConfigError.
    """
    gate = read_gate(path)
    method, _, metric = gate.method.partition(":")
    metric = metric or UNNAMED_METRIC
    if method != SERVED_METHOD or metric not in METRICS:
        raise ConfigError(
            f"{path}: the gate is of the method {gate.method}; evaluate one that is served: "
            + ", ".join(f"{SERVED_METHOD}:{name}" for name in METRICS)
        )
    measured = (gate.probe_heads, gate.alpha)
    served = (probe_heads, alpha)
    if measured != served:
        raise ConfigError(
            f"{path}: the gate was measured with {_identification(*measured)}, and workers find tokens with "
            f"{_identification(*served)}"
        )
    return ImportanceGate(measured=gate, metric=metric)


def check_default(gate: ImportanceGate, ratio: float, *, setting: str) -> None:
    """Raise ConfigError when ``gate`` does not allow ``ratio``, which ``setting`` makes a default."""
    try:
        require(gate.measured, model=gate.measured.model, ratio=ratio)
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error.message}") from error


def _identification(probe_heads: int, alpha: float) -> str:
    return f"{probe_heads} probe heads (alpha {alpha:g})"


def _evidence(gate: QualityGate, ratio: float) -> str:
    """Return the measurement that decides ``ratio``.

    It is that of the largest failed ratio up to ``ratio``, of the largest that failed, or of the smallest where none
    did.
    """
    if not gate.ratios:
        return f"nothing was measured on {gate.task}"
    failed = [one for one in gate.ratios if not one.passed]
    one = next((one for one in failed if one.ratio <= ratio), failed[0]) if failed else gate.ratios[-1]
    drop = f"{one.drop_points:.2f} ± {one.standard_error_points:.2f}"
    text = f"on {gate.task}, {one.ratio:g} lost {drop} points of accuracy, and the limit is {gate.max_drop_points:g}"
    return text if failed else f"{text}; nothing smaller was measured"
