"""Figures that no model made."""

from __future__ import annotations

from typing import Any

from thermocline.evaluation.figures import Evaluation, MethodFigure


def figure(ratio: float, *, drop: float, error: float = 0.1, method: str = "importance") -> MethodFigure:
    return MethodFigure(
        method=method,
        ratio=ratio,
        accuracy=0.9,
        drop_points=drop,
        standard_error_points=error,
        lost=2,
        gained=1,
        nats_lost=0.01,
        read=0.5,
        fallbacks=0.25,
        seconds=1.0,
    )


def evaluation(*methods: MethodFigure, **changes: Any) -> Evaluation:
    fields: dict[str, Any] = {
        "task": "documents",
        "task_digest": "d" * 32,
        "model": "m",
        "model_fingerprint": "f" * 32,
        "dtype": "float32",
        "seed": 0,
        "questions": 2000,
        "prefixes": 40,
        "prefix_tokens": 1018,
        "chance": 0.25,
        "accuracy": 0.95,
        "standard_error_points": 0.49,
        "deviation_nats": 1e-5,
        "probe_heads": 3,
        "alpha": 0.6,
        "first_tokens": 0,
        "recent_tokens": 0,
        "seconds": 1.0,
        "methods": methods,
    }
    return Evaluation(**fields | changes)
