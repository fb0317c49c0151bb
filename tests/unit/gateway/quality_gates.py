"""Quality gates as an evaluation would write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shared.quality_gate import QualityGate, write_gate
from tests.unit.gateway.running_gateway import FACTS
from tests.unit.shared.quality_gates import quality_gate

DROPS = {0.5: 0.05, 0.25: 0.1, 0.1: 1.5}


def gate_of(drops: dict[float, float] = DROPS, **changes: Any) -> QualityGate:
    """A gate of the served model."""
    return quality_gate(drops, **{"model": FACTS.fingerprint} | changes)


def gate_file(folder: Path, drops: dict[float, float] = DROPS, **changes: Any) -> str:
    """The same in a file; its path."""
    path = folder / "gate.json"
    write_gate(gate_of(drops, **changes), path)
    return str(path)
