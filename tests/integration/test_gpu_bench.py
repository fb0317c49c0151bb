"""The serving part of the GPU benchmark, with a tiny model and whole processes on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]


def test_a_cell_is_asked_under_several_settings_and_answers_from_its_disk(tmp_path: Path) -> None:
    """Mechanisms are switched in the running cell: without a host tier less is cached. From the disk a document comes
    back as KV and in part.
    """
    out = tmp_path / "out.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}

    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu.serving", "--cpu", "--out", str(out)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text(encoding="utf-8"))["results"]
    assert [each["case"] for each in results["cases"]] == [
        "loogle, all on", "loogle, no host tier", "sharegpt, all on",
    ]  # fmt: skip
    assert all(each["requests"] for each in results["cases"])
    ways = {each["way"]: each for each in results["from_disk"]}
    assert ways["recomputed"]["found_tokens"] == [{}]
    assert ways["as KV"]["found_tokens"] == [{"disk": 256}]
    assert not list(tmp_path.glob("thermocline-bench-*"))
