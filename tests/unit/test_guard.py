"""What becomes of a test that hangs or eats memory, and of what a process of tests leaves behind."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.guard import processes_of, segments_of

ROOT = Path(__file__).parents[2]

# Guards itself, starts a process that would go on for ever, makes a segment, and then does what is asked.
GUARDED = """
import os, subprocess, sys
from shared.memory import SharedSegment
from tests.guard import Guard
variable, run, then = sys.argv[1:]
os.environ[variable] = run
guard = Guard.start(variable, run, most_bytes=300 * 2**20)
guard.tell("test", "tests/test_it.py::test_one")
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
segment = SharedSegment.create("of-a-cell", "device", 4096)
print(segment.name, flush=True)
if then == "eat":
    kept = []
    while True:
        kept.append(bytes(10**6))
if then == "end":
    child.kill()
    child.wait()
    segment.unlink()
    guard.dismiss()
os._exit(1)
"""

HANGING = """
import pytest
from hypothesis import given, strategies

@given(strategies.integers())
def test_without_end(number):
    while True:
        pass

def test_behind_it():
    pass
"""


def run_guarded(then: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """A guarded process that ends in this way, and what it called itself. Returns when its guard has ended too."""
    run = f"test-{os.getpid()}-{secrets.token_hex(3)}"
    # The guard holds the pipe of errors until it has cleared up.
    ended = subprocess.run(
        [sys.executable, "-c", GUARDED, "TC_GUARDED_RUN", run, then],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return ended, run


@pytest.mark.parametrize(("then", "code"), [("die", 1), ("eat", -signal.SIGKILL)])
def test_nothing_is_left_of_a_process_that_does_not_clear_up(then: str, code: int) -> None:
    """Whatever ended it, its children end and its segments go; the test in which it ended is named, and one that ate
    memory with what it took, and what it might have taken.
    """
    ended, run = run_guarded(then)

    assert ended.returncode == code
    assert "ended in tests/test_it.py::test_one" in ended.stderr
    assert processes_of("TC_GUARDED_RUN", run) == {}
    assert not Path("/dev/shm", ended.stdout.strip()).exists()
    for said in ("tests/test_it.py::test_one took", f"more than {300 * 2**20:,}: killed"):
        assert (said in ended.stderr) == (then == "eat")


def test_a_process_that_clears_up_hears_nothing() -> None:
    """Its guard says nothing and ends with it."""
    ended, run = run_guarded("end")

    assert ended.stderr == ""
    assert segments_of(run, set()) == []


def test_a_hang_inside_given_fails_the_run_and_is_named(tmp_path: Path) -> None:
    """Its process ends; the tests behind it run in another, once each."""
    (tmp_path / "test_hanging.py").write_text(HANGING)

    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path,
         "-n", "1", "--dist", "loadfile", "--no-loadscope-reorder", "--timeout", "5", "-q", tmp_path],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip

    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "crashed while running 'test_hanging.py::test_without_end'" in ended.stdout
    assert "1 failed, 1 passed" in ended.stdout
