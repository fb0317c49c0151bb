"""Quality gates as an evaluation would write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from shared.quality_gate import GatedRatio, QualityGate, write_gate
from tests.unit.gateway.running_gateway import FACTS

DROPS = {0.5: 0.05, 0.25: 0.1, 0.1: 1.5}
LIMIT = 0.2


def gate_of(drops: dict[float, float] = DROPS, **changes: Any) -> QualityGate:
    """A gate of the served model and method that allows what drops by at most ``LIMIT`` points."""
    gate = QualityGate(
        model=FACTS.fingerprint,
        dtype="float32",
        task="choosing",
        task_digest="def",
        questions=2000,
        method="importance:last_pooled",
        probe_heads=3,
        probe_unit="kv_head",
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


def gate_file(folder: Path, drops: dict[float, float] = DROPS, **changes: Any) -> str:
    """The same in a file; its path."""
    path = folder / "gate.json"
    write_gate(gate_of(drops, **changes), path)
    return str(path)
