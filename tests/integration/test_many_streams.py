"""The benchmark of many streams, made small, on a cell of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]


def test_streams_are_measured_and_their_processor_time_is_told_by_process(tmp_path: Path) -> None:
    """More clients than run at once get all their tokens."""
    out = tmp_path / "out.json"
    line = ["--streams", "4,300", "--tokens", "4", "--rounds", "1", "--share", "0.1", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "bench.many_streams", *line],
        cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    ours = json.loads(out.read_text(encoding="utf-8"))["results"]["systems"]["ours"]
    assert all(ours[streams]["tokens_per_s"] > 0 for streams in ("4", "300"))
    assert {"gateway", "scheduler", "worker", "nats", "client"} <= ours["300"]["processor_us_a_token"].keys()
