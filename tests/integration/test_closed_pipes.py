"""Commands whose output nothing reads any more end quietly, with the code that a shell gives for a closed pipe."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.guard import EXIT_PIPE_CLOSED
from thermocline.commands import commands

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]

ENTRIES = sorted(
    path.relative_to(ROOT)
    for folder in ("thermocline", "services")
    for path in (ROOT / folder).rglob("*.py")
    if '\nif __name__ == "__main__":' in path.read_text(encoding="utf-8")
)

NOT_FOR_PEOPLE = {
    Path("services/worker/parallel/__main__.py"),
    Path("services/worker/proving/child.py"),
    Path("services/worker/proving/ipc_proofs.py"),
    Path("thermocline/load/null_server.py"),
    Path("thermocline/testing/other_process.py"),
}
"""Processes that another one starts, and that end with it."""


def run_into_closed_pipe(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``python ARGUMENTS`` whose standard output nothing reads from the beginning."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=240,
            cwd=ROOT,
        )
    finally:
        os.close(writer)


_HELP_OF_EACH = """
import gc, os, sys
from thermocline.__main__ import main
from thermocline.commands import commands

# What all of them import is imported once, and not looked through at each end; each is a process of its own.
for command in commands().values():
    command.load()
gc.freeze()
for name in commands():
    if not os.fork():
        sys.argv[1:] = [name, "--help"]
        sys.exit(main())
    print(name, os.waitstatus_to_exitcode(os.wait()[1]), file=sys.stderr, flush=True)
"""


def test_the_help_of_every_command_may_be_cut_off() -> None:
    """As by ``thermocline COMMAND --help | head -1``: each ends with the code, and says nothing."""
    done = run_into_closed_pipe("-c", _HELP_OF_EACH)

    assert done.stderr.splitlines() == [f"{name} {EXIT_PIPE_CLOSED}" for name in commands()]
    assert done.returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["-m", "thermocline"],
        ["-m", "thermocline", "--help"],
        ["-m", "thermocline", "settings"],
        ["-m", "thermocline", "replay", "tests/replay/recordings/{recording}"],
        ["-m", "thermocline.cache", "--help"],
        ["-m", "services.gateway", "--help"],
    ],
)
def test_results_may_be_cut_off(arguments: list[str]) -> None:
    """What goes to standard error is still told."""
    recording = min((ROOT / "tests/replay/recordings").glob("*.tcrec"), key=lambda path: path.stat().st_size).name
    done = run_into_closed_pipe(*(each.format(recording=recording) for each in arguments))

    is_usage = arguments == ["-m", "thermocline"]
    assert done.returncode == (2 if is_usage else EXIT_PIPE_CLOSED)
    assert "Traceback" not in done.stderr
    assert bool(done.stderr) == is_usage


def test_up_stops_when_nothing_reads_what_it_says(tmp_path: Path) -> None:
    """Before the cell is ready; what it had started is gone."""
    done = run_into_closed_pipe("-m", "thermocline", "up", "--port", "0", "--data-dir", str(tmp_path))

    assert (done.returncode, done.stderr) == (EXIT_PIPE_CLOSED, "")
    assert not [name for name in os.listdir("/proc") if name.isdigit() and str(tmp_path) in command_line(name)]


def command_line(pid: str) -> str:
    """Of a process that may have ended."""
    try:
        return Path("/proc", pid, "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


@pytest.mark.parametrize("path", [path for path in ENTRIES if path not in NOT_FOR_PEOPLE], ids=str)
def test_every_program_ends_by_the_guard(path: Path) -> None:
    """``python -m`` of any module of ours is guarded as the command is."""
    last = ast.parse((ROOT / path).read_text(encoding="utf-8")).body[-1]

    expected = "sys.exit(main())" if path == Path("thermocline/__main__.py") else "sys.exit(guarded(main))"
    assert isinstance(last, ast.If)
    assert ast.unparse(last.body[-1]) == expected
