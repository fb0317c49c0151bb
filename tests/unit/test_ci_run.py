"""``.ci/run`` in a folder of its own, with a stand-in for ``./task``."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(folder: Path, task: str, limit_s: str) -> subprocess.CompletedProcess[str]:
    """Run a copy of ``.ci/run`` beside a ``./task`` of these shell commands."""
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", folder / ".ci/run")
    (folder / "task").write_text(f"#!/bin/sh\n{task}\n")
    (folder / "task").chmod(0o755)
    return subprocess.run(
        [folder / ".ci/run"],
        env=os.environ | {"CI_LIMIT_S": limit_s},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_it_runs_the_tests_and_ends_as_they_do(tmp_path: Path) -> None:
    """The word that it gives to ``./task``, and its exit code."""
    ended = run(tmp_path, 'echo "ran $*"; exit 3', "1000")

    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "ran test\n", "")


def test_a_run_without_end_is_stopped_and_told(tmp_path: Path) -> None:
    """The exit code is that of ``timeout``, and the last line says what happened."""
    os.mkfifo(tmp_path / "never")

    ended = run(tmp_path, f"cat {tmp_path}/never", "0.2")

    assert ended.returncode == 124
    assert ended.stderr.startswith("FAILED: the run did not end within 0.2 seconds")
