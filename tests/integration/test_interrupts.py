"""Ctrl-C at a real terminal: no traceback in any process, nothing left, and exit code 0 or 130."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from shared.guard import EXIT_INTERRUPTED
from shared.memory.segment import SHM_DIRECTORY
from tests.integration.test_closed_pipes import command_line
from thermocline.commands import commands
from thermocline.supervisor.records import all_records, runs_dir

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
WAIT_S = 300.0
CTRL_C = b"\x03"

SMALL = ("--port", "0", "--threads", "1", "--device-kv-bytes", "16MiB", "--host-kv-bytes", "32MiB")


class AtTerminal:
    """A command in the foreground of a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._master, terminal = os.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "thermocline", *arguments],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            cwd=ROOT,
            start_new_session=True,
            # The session's own terminal, whose foreground it is in.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(terminal)
        self.shown = ""

    def until(self, pattern: str) -> None:
        """Read until ``pattern`` was shown; fails when the command ends before."""
        while not re.search(pattern, self.shown):
            assert self._read(), f"{pattern!r} was never shown:\n{self.shown}"

    def interrupt(self) -> None:
        """Press Ctrl-C: the kernel sends SIGINT to every process of the foreground group."""
        os.write(self._master, CTRL_C)

    def end(self) -> int:
        """Read what is still said, and return the exit code."""
        while self._read():
            pass
        return self.process.wait(WAIT_S)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._master], [], [], WAIT_S)
        assert ready, f"nothing was shown for {WAIT_S:.0f} s:\n{self.shown}"
        try:
            data = os.read(self._master, 65_536)
        except OSError:
            return False  # The last process has let go of the terminal.
        self.shown += data.decode(errors="replace")
        return bool(data)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._master)


@contextlib.contextmanager
def at_terminal(*arguments: str) -> Iterator[AtTerminal]:
    command = AtTerminal(*arguments)
    try:
        yield command
    finally:
        command.close()


def assert_nothing_is_left(data_dir: Path, shown: str) -> None:
    """No traceback was shown or logged, no process runs and no shared memory is there."""
    assert "Traceback" not in shown
    for log in (data_dir / "logs").glob("*.log"):
        text = log.read_text(errors="replace")
        assert "Traceback" not in text, f"{log.name}: {text}"
        assert "KeyboardInterrupt" not in text, f"{log.name}: {text}"
    assert not [name for name in os.listdir("/proc") if name.isdigit() and str(data_dir) in command_line(name)]


@pytest.mark.parametrize("phase", ["importing PyTorch", "loading weights"])
def test_ctrl_c_while_a_cell_starts(phase: str, tmp_path: Path) -> None:
    """Whatever its processes are in the middle of; a command whose cell starts is below."""
    before = set(os.listdir(SHM_DIRECTORY))
    with at_terminal("up", *SMALL, "--data-dir", str(tmp_path)) as up:
        up.until(phase)
        up.interrupt()
        code = up.end()

    assert code == 0, up.shown
    assert "thermocline up: stopping; Ctrl-C again kills at once" in up.shown
    assert "is ready at" not in up.shown
    assert_nothing_is_left(tmp_path, up.shown)
    assert not [name for name in set(os.listdir(SHM_DIRECTORY)) - before if name.startswith(f"tc-{up.process.pid}-")]


def test_ctrl_c_in_the_middle_of_an_answer(tmp_path: Path) -> None:
    """The answer ends within the time that is left to it, or with a typed error; the cell stops as asked."""
    with at_terminal("up", *SMALL, "--grace-s", "1", "--data-dir", str(tmp_path)) as up:
        up.until(r"is ready at (\S+) ")
        found = re.search(r"is ready at (\S+) \(model ([^,]+),", up.shown)
        assert found
        body = {"model": found[2], "prompt": "The password", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        begun, lines = threading.Event(), []

        def ask() -> None:
            url = f"{found[1]}/v1/completions"
            with (
                contextlib.suppress(httpx.HTTPError),
                httpx.stream("POST", url, json=body, timeout=WAIT_S, trust_env=False) as response,
            ):
                for line in response.iter_lines():
                    lines.append(line)
                    begun.set()
            begun.set()

        asking = threading.Thread(target=ask)
        asking.start()
        begun.wait(WAIT_S)
        up.interrupt()
        code = up.end()
        asking.join(WAIT_S)

    assert code == 0, up.shown
    assert lines
    assert "choices" in json.loads(lines[0].removeprefix("data: ")), lines[0]
    assert_nothing_is_left(tmp_path, up.shown)


def test_a_second_ctrl_c_kills_what_does_not_stop(tmp_path: Path) -> None:
    """A process that is stuck does not keep its operator."""
    with at_terminal("up", *SMALL, "--grace-s", "500", "--data-dir", str(tmp_path)) as up:
        up.until("importing PyTorch")
        record = next(record for _, record in all_records(runs_dir()) if record.owner_pid == up.process.pid)
        stuck = next(child.pid for child in record.children if child.name == "scheduler")
        os.kill(stuck, signal.SIGSTOP)
        up.interrupt()
        up.until("stopping; Ctrl-C again kills at once")
        up.interrupt()
        code = up.end()

    assert code == 0, up.shown
    assert_nothing_is_left(tmp_path, up.shown)


def test_ctrl_c_in_a_command_that_runs_a_cell() -> None:
    """The terminal tells the command alone, which takes its cell down."""
    with at_terminal("demo") as demo:
        demo.until("Starting the cell")
        demo.interrupt()
        code = demo.end()

    assert code == EXIT_INTERRUPTED, demo.shown
    assert "Traceback" not in demo.shown


_EACH_INTERRUPTED_WHILE_IMPORTING = """
import os, signal, sys
from thermocline.__main__ import main
from thermocline.commands import commands

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
told = os.dup(1)
os.dup2(2, 1)
module = ""
for command in commands().values():
    module = command.module
    if not os.fork():
        sys.argv[1:] = [command.name]
        sys.exit(main())
    os.write(told, f"{command.name} {os.waitstatus_to_exitcode(os.wait()[1])}\\n".encode())
"""


def test_ctrl_c_while_a_command_is_imported() -> None:
    """Every command, from its first line on, each in a process of its own: it ends with the code, and says nothing."""
    command = [sys.executable, "-c", _EACH_INTERRUPTED_WHILE_IMPORTING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT)

    assert done.stdout.splitlines() == [f"{name} {EXIT_INTERRUPTED}" for name in commands()]
    assert (done.returncode, done.stderr) == (0, "")


_INTERRUPTED_BEFORE_ANY_COMMAND = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from thermocline.__main__ import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    "module", ["thermocline.dispatch", "shared.arguments", "shared.errors", "thermocline.commands"]
)
def test_ctrl_c_before_a_command_is_found(module: str) -> None:
    """The table of commands and what it needs are imported under the guard, too."""
    command = [sys.executable, "-c", _INTERRUPTED_BEFORE_ANY_COMMAND, module]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)

    assert (done.returncode, done.stdout, done.stderr) == (EXIT_INTERRUPTED, "", "")
