"""A test that ends its process is run once, and the run ends (tests/crashed_tests.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFTEST = """
import pytest

@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from tests.crashed_tests import EachTestOnce
    return EachTestOnce(config, log)
"""
FILES = 30


def test_a_run_in_which_a_process_ends_comes_to_its_end(tmp_path: Path) -> None:
    """However many files that process had done: none of them is handed out again."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for number in range(FILES):
        (tmp_path / f"test_{number:02}.py").write_text("def test_one(): pass\n")
    (tmp_path / f"test_{FILES}.py").write_text("import os\ndef test_dies(): os._exit(1)\ndef test_two(): pass\n")
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]

    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True, text=True, timeout=200, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip

    assert f"1 failed, {FILES + 1} passed" in done.stdout, done.stdout + done.stderr
    assert f"crashed while running 'test_{FILES}.py::test_dies'" in done.stdout
