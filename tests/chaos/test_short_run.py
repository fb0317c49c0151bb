"""``thermocline chaos`` for a short while: faults of several kinds, and nobody noticed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

# A seed whose first faults are of several kinds: the worker's connection to the broker is cut, the storage and the
# scheduler die, and a bit of a chunk on the disk flips. Workers that die under load are in test_survival.py.
SEED = 21925
FAULTS = 4


def test_a_short_run_of_faults_changes_no_answer_and_leaves_nothing(tmp_path: Path) -> None:
    """Exit code 0 says that every answer was right and everything was given back; the figures say that it was tried."""
    figures_file = tmp_path / "chaos.json"
    command = [
        sys.executable,
        "-m",
        "thermocline",
        "chaos",
        "--seed",
        str(SEED),
        "--faults",
        str(FAULTS),
        "--workers",
        "1",
    ]
    command += ["--questions", "4", "--concurrency", "8", "--pause", "0.8", "--out", str(figures_file)]

    done = subprocess.run(command, capture_output=True, text=True, timeout=580, cwd=Path(__file__).parents[2])

    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    figures = json.loads(figures_file.read_text(encoding="utf-8"))
    assert figures["violations"] == []
    assert figures["faults"] == FAULTS
    assert figures["rests"] == 1
    assert figures["endings"]["answered"] > FAULTS
    assert figures["tokens"] > 300
