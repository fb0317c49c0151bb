"""Parts of the GPU benchmark that start whole processes, with small models on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]


def run_part(name: str, tmp_path: Path) -> dict[str, Any]:
    """The results of a part alone, which leaves nothing else behind."""
    out = tmp_path / "out.json"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", f"bench.gpu.{name}", "--cpu", "--out", str(out)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(tmp_path.glob("thermocline-bench-*"))
    results: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))["results"]
    return results


def test_cells_are_asked_under_several_settings_and_answer_from_their_disk(tmp_path: Path) -> None:
    """By each mover, with the host tier and without. From the disk a document comes back as KV and in part."""
    results = run_part("serving", tmp_path)

    assert [each["case"] for each in results["cases"]] == [
        "batched: loogle, all on", "batched: loogle, no host tier", "per-page: loogle, all on",
        "profiled: loogle, all on",
    ]  # fmt: skip
    assert all(each["requests"] for each in results["cases"])
    assert [each["setup"] for each in results["starts"]] == ["batched", "per-page", "profiled"]
    ways = {each["way"]: each for each in results["from_disk"]}
    assert ways["recomputed"]["found_tokens"] == [{}]
    assert ways["as KV"]["found_tokens"] == [{"disk": 256}]


def test_each_process_is_killed_and_serves_again_from_host_memory(tmp_path: Path) -> None:
    """With the same tokens as before."""
    results = run_part("restarts", tmp_path)

    assert list(results["processes"]) == ["worker-0", "storage", "scheduler", "gateway"]
    assert all(2 * each["host_tokens"] > each["prompt_tokens"] for each in results["processes"].values())


def test_tokens_are_compared_with_those_without_the_cache(tmp_path: Path) -> None:
    """In float32 on a processor they are equal by every way; the prefix came from where it should."""
    results = run_part("tokens", tmp_path)
    modes = results["modes"]

    assert all(found["equal"] == found["answers"] > 0 for mode in modes.values() for found in mode.values())
    assert modes["default"]["device"]["device_tokens"] > 0
    assert modes["default"]["host"]["host_tokens"] > 0
    assert (list(modes), results["no_exact_mode"]) == (["default"], "not on a processor")
