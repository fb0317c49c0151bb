"""Tests that need a GPU are kept up with what they import, where there is none too."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "gpu").glob("*.py")), ids=lambda path: path.stem)
def test_it_can_be_imported(path: Path) -> None:
    """Nobody who moves a module sees these tests run."""
    importlib.import_module(f"tests.gpu.{path.stem}")
