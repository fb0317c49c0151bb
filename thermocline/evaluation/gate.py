"""The quality gate of a method: the drop at each ratio against a limit."""

from __future__ import annotations

from shared.quality_gate import GatedRatio, QualityGate
from thermocline.evaluation.figures import Evaluation, MethodFigure


def judge(evaluation: Evaluation, method: str, max_drop_points: float) -> QualityGate:
    """Return the gate: a ratio passes when its drop and the drop's standard error are within the limit."""
    found = sorted((one for one in evaluation.methods if one.method == method), key=lambda one: -one.ratio)
    return QualityGate(
        model=evaluation.model_fingerprint,
        dtype=evaluation.dtype,
        task=evaluation.task,
        task_digest=evaluation.task_digest,
        questions=evaluation.questions,
        method=method,
        probe_heads=evaluation.probe_heads,
        alpha=evaluation.alpha,
        first_tokens=evaluation.first_tokens,
        recent_tokens=evaluation.recent_tokens,
        max_drop_points=max_drop_points,
        ratios=tuple(
            GatedRatio(
                ratio=one.ratio,
                drop_points=one.drop_points,
                standard_error_points=one.standard_error_points,
                passed=_fault(one, max_drop_points) == "",
            )
            for one in found
        ),
    )


def faults(evaluation: Evaluation, method: str, max_drop_points: float) -> list[str]:
    """Return one line for each ratio that does not pass, in the order of the evaluation."""
    found = [(one, _fault(one, max_drop_points)) for one in evaluation.methods if one.method == method]
    return [f"{method} at ratio {one.ratio:g} {fault}" for one, fault in found if fault]


def _fault(figure: MethodFigure, max_drop_points: float) -> str:
    # So that a figure or a limit that is no number does not pass.
    if not figure.drop_points <= max_drop_points:
        return f"drops {figure.drop_points:.2f} points, more than {max_drop_points:g}"
    if not figure.standard_error_points <= max_drop_points:
        return (
            f"drops {figure.drop_points:.2f} points with a standard error of {figure.standard_error_points:.2f}: "
            f"too few questions to tell whether that is within {max_drop_points:g}"
        )
    return ""
