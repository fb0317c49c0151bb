"""What a deployment may load, by the outcome of an evaluation."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shared.errors import ConfigError
from shared.quality_gate import QualityGate, read_gate, require, write_gate
from tests.unit.shared.quality_gates import LIMIT, quality_gate


def gate_with(*passed: bool) -> QualityGate:
    """Ratios of 0.5, 0.25 and 0.1 with these outcomes."""
    return quality_gate({ratio: 0.0 if one else 2 * LIMIT for ratio, one in zip((0.5, 0.25, 0.1), passed, strict=True)})


@pytest.mark.parametrize(
    ("passed", "least"),
    [
        ((True, True, True), 0.1),
        ((True, True, False), 0.25),
        ((True, False, True), 0.5),
        ((False, True, True), 1.0),
    ],
)
def test_a_ratio_passes_with_all_larger_ones(passed: tuple[bool, ...], least: float) -> None:
    """A smaller ratio that passed below one that did not was luck."""
    assert gate_with(*passed).least_ratio == least


@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.3, 0.25])
def test_what_passed_is_allowed(ratio: float) -> None:
    """So is any ratio above it."""
    require(gate_with(True, True, False), model="abc", ratio=ratio)


@pytest.mark.parametrize(
    ("model", "ratio", "message"), [("abc", 0.2, "no ratio below 0.25"), ("xyz", 0.5, "of model abc, not of xyz")]
)
def test_anything_else_is_not(model: str, ratio: float, message: str) -> None:
    """A smaller ratio, and any other model."""
    with pytest.raises(ConfigError, match=message):
        require(gate_with(True, True, False), model=model, ratio=ratio)


def test_a_gate_is_read_as_it_was_written(tmp_path: Path) -> None:
    """The file has everything."""
    gate = gate_with(True, False, True)

    write_gate(gate, tmp_path / "new" / "gate.json")

    assert read_gate(tmp_path / "new" / "gate.json") == gate


@pytest.mark.parametrize("content", [b"", b"{}", msgspec.json.encode({"type": "quality_gate_2"})])
def test_any_other_file_is_refused(content: bytes, tmp_path: Path) -> None:
    """Also one of a later format, whose rules may differ."""
    path = tmp_path / "gate.json"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match="is no quality gate"):
        read_gate(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_gate(tmp_path / "none.json")
