"""Nobody changes what computes KV without thinking of the epoch of numerics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared.numerics import NUMERICS_EPOCH
from tools import numerics

KERNEL = "services/worker/kernels/made.py"
NATIVE = "services/worker/native/made.c"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tree with one kernel of each kind."""
    for name, text in ((KERNEL, '"""What."""\nX = 1  # Why.\n'), (NATIVE, "/* what */\nint x = 1; // why\n")):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    (tmp_path / numerics.PROJECT).write_text('dependencies = ["torch>=2.13,<2.14"]')
    return tmp_path


def test_the_epoch_was_thought_of() -> None:
    """Since the sources that compute KV were changed. If not: python -m tools.numerics says what to do."""
    kept = json.loads(numerics.RECORD.read_text())

    assert numerics.changed(numerics.sources(), kept["sources"]) == []
    assert kept["epoch"] == NUMERICS_EPOCH


def test_each_pattern_finds_something() -> None:
    """A module that was renamed is looked for under its new name."""
    assert [pattern for pattern in numerics.SOURCES if not list(numerics.ROOT.glob(pattern))] == []


@pytest.mark.parametrize(
    ("name", "text", "is_noticed"),
    [
        (KERNEL, "X = 2\n", True),
        (KERNEL, '"""Other words."""\n\nX = (1)\n', False),
        (NATIVE, "int x = 2;\n", True),
        (NATIVE, "int x   = 1;\n", False),
        (numerics.PROJECT, 'dependencies = ["torch>=2.13,<2.15"]', True),
        (numerics.PROJECT, 'dependencies = ["torch>=2.13,<2.14", "other>=1"]', False),
        ("services/worker/kernels/new.py", "Y = 1\n", True),
    ],
)
def test_code_counts_and_prose_does_not(root: Path, name: str, text: str, is_noticed: bool) -> None:
    """Comments, docstrings and layout are not what is computed."""
    before = numerics.sources(root)
    (root / name).write_text(text)

    expected = ["torch" if name == numerics.PROJECT else name] if is_noticed else []
    assert numerics.changed(numerics.sources(root), before) == expected
