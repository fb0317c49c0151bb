"""A quality gate as an evaluation would write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from shared.quality_gate import GatedRatio, QualityGate

LIMIT = 0.2
"""Most points that a ratio may drop."""


def quality_gate(drops: Mapping[float, float], **changes: Any) -> QualityGate:
    """A gate that allows every ratio that drops by at most ``LIMIT`` points."""
    gate = QualityGate(
        model="abc",
        dtype="float32",
        task="choosing",
        task_digest="def",
        questions=2000,
        method="importance:last_pooled",
        probe_heads=3,
        alpha=0.6,
        first_tokens=0,
        recent_tokens=0,
        max_drop_points=LIMIT,
        ratios=tuple(
            GatedRatio(ratio=ratio, drop_points=drop, standard_error_points=0.12, passed=drop <= LIMIT)
            for ratio, drop in drops.items()
        ),
    )
    return msgspec.structs.replace(gate, **changes)
