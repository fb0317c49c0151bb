"""``--help`` of every command under ``bench/`` and ``tools/`` prints a usage, runs nothing and writes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

CASES = "bench.clients.cases."
"""Programs that ``bench.clients`` starts with other interpreters, whose packages are not installed here."""

STARTED_BY_OTHERS = {
    "bench.gpu.other_worker": "a part of bench.gpu starts it and ends it by standard input",
    "bench.paced_worker": "a benchmark starts it in place of a worker, with its pace in environment variables",
}

_PROGRAM = """
import contextlib, io, json, os, runpy, signal, sys, warnings

root, names = json.load(sys.stdin)
sys.dont_write_bytecode = True
warnings.simplefilter("ignore")

class Ran(BaseException):
    pass

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
STARTS = {"subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink"}
watched = False

def is_ours(path):
    return isinstance(path, (str, os.PathLike)) and os.path.abspath(path).startswith(root)

def watch(event, arguments):
    if not watched:
        return
    if event in STARTS:
        raise Ran(f"starts a process: {arguments[0]}")
    if event == "open" and arguments[2] & WRITES and is_ours(arguments[0]):
        raise Ran(f"writes {arguments[0]}")
    if event in CHANGES and is_ours(arguments[0]):
        raise Ran(f"{event} {arguments[0]}")

def late(number, frame):
    raise Ran("runs")

sys.addaudithook(watch)
signal.signal(signal.SIGALRM, late)
signal.signal(signal.SIGPROF, late)

def call(name, flag):
    global watched
    sys.argv = [name, flag]
    out = io.StringIO()
    watched = True
    signal.alarm(120)
    signal.setitimer(signal.ITIMER_PROF, 40)  # Busy cores do not count.
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        code = "returned"
    except SystemExit as exit:
        code = exit.code
    except BaseException as error:
        code = f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        watched = False
    return [code, out.getvalue()[:2000]]

import torch  # Shared by most of them; what it starts when it is imported is not theirs.

answers = {}
for name in names:
    answers[name] = {"--help": call(name, "--help")}
    if answers[name]["--help"][0] == 0:
        answers[name]["--no-such-flag"] = call(name, "--no-such-flag")
json.dump(answers, sys.stdout)
"""


def commands() -> list[str]:
    """Modules that are programs, by name."""
    found = []
    for path in sorted(file for top in ("bench", "tools") for file in (ROOT / top).rglob("*.py")):
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
            if not name.startswith(CASES) and name not in STARTED_BY_OTHERS:
                found.append(name)
    return found


@cache
def answers() -> dict[str, dict[str, tuple[Any, str]]]:
    """What each command does with each flag: exit code or fault, and the start of what it prints.

    All run in one process, which shares their imports. A command that starts a process, changes a file of the tree or
    computes for more than 40 s, or waits for 120 s, is stopped.
    """
    order = json.dumps([str(ROOT), commands()])
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], input=order, capture_output=True, text=True, timeout=500, cwd=ROOT, check=True
    )
    found: dict[str, dict[str, tuple[Any, str]]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", commands())
def test_help_is_printed_and_nothing_runs(name: str) -> None:
    """Someone who asks what a command does must not start it, or overwrite results with it."""
    code, printed = answers()[name]["--help"]

    assert code == 0, f"{code}\n{printed}"
    assert "usage:" in printed.lower()


@pytest.mark.parametrize("name", commands())
def test_unknown_flags_are_refused(name: str) -> None:
    """A misspelt flag is an error, not a run with defaults."""
    code, printed = answers()[name].get("--no-such-flag", ("--help failed", ""))

    assert code == 2, f"{code}\n{printed}"
