"""How a process ends on Ctrl-C, and when nothing reads its output any more."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shared.guard import EXIT_INTERRUPTED, EXIT_PIPE_CLOSED

ROOT = Path(__file__).parents[3]


def run(
    code: str, *, stdout: int = subprocess.PIPE, redirect: str = "", most_bytes: int = resource.RLIM_INFINITY
) -> subprocess.CompletedProcess[str]:
    """A process whose whole work is ``main``, as ``code`` defines it; its files hold ``most_bytes`` at most."""
    limit = f"import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, ({most_bytes}, {resource.RLIM_INFINITY}))\n"
    program = f"{limit}import os, signal, sys\nfrom shared.guard import guarded\n{code}\nsys.exit(guarded(main))\n"
    command = ["sh", "-c", f'exec "$0" -c "$1" {redirect}', sys.executable, program]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=120)


def closed_pipe() -> int:
    """The writing end of a pipe that nothing reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize(
    "code",
    [
        "def main():\n    print('x' * 100_000, flush=True)\n    return 0",
        "def main():\n    print('still in the buffer')\n    return 0",
        "def main():\n    print('as argparse does')\n    sys.exit(0)",
    ],
)
def test_a_closed_pipe_is_an_exit_code(code: str) -> None:
    """Whether the pipe broke while something was written, or at the end of what was buffered."""
    writer = closed_pipe()
    try:
        done = run(code, stdout=writer)
    finally:
        os.close(writer)

    assert (done.returncode, done.stderr) == (EXIT_PIPE_CLOSED, "")


def test_a_broken_pipe_elsewhere_is_an_error() -> None:
    """A socket of the process that broke says nothing of its output, and its traceback is wanted."""
    done = run("def main():\n    raise BrokenPipeError('a peer')")

    assert done.returncode == 1
    assert "BrokenPipeError: a peer" in done.stderr


@pytest.mark.parametrize("size", [100, 100_000])
def test_an_output_without_room_is_one_line(tmp_path: Path, size: int) -> None:
    """As on a full disk, whether what did not fit was still in the buffer or not."""
    with (tmp_path / "out").open("w") as out:
        done = run(f"def main():\n    print('x' * {size})\n    return 0", stdout=out.fileno(), most_bytes=50)

    assert (done.returncode, done.stderr) == (1, "thermocline: cannot write the output: File too large\n")


def test_a_full_disk_elsewhere_is_an_error(tmp_path: Path) -> None:
    """The output takes more, and the traceback is wanted."""
    with (tmp_path / "out").open("w") as out:
        done = run("def main():\n    raise OSError(28, 'No space left on device')", stdout=out.fileno())

    assert done.returncode == 1
    assert "OSError: [Errno 28] No space left on device" in done.stderr


def test_ctrl_c_is_an_exit_code() -> None:
    """Without a traceback."""
    done = run("def main():\n    print('told', flush=True)\n    os.kill(os.getpid(), signal.SIGINT)\n    return 0")

    assert (done.returncode, done.stdout, done.stderr) == (EXIT_INTERRUPTED, "told\n", "")


def test_a_second_ctrl_c_ends_what_still_waits_for_threads() -> None:
    """The interpreter waits for threads at its end; the signal itself ends that."""
    done = run(
        "import threading\n"
        "def work():\n"
        "    threading.main_thread().join()\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    threading.Event().wait()\n"
        "def main():\n"
        "    threading.Thread(target=work).start()\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    return 0"
    )

    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_a_process_without_output_opens_no_file_in_its_place() -> None:
    """Started with ``>&-``, what it prints goes nowhere, and not into the first file that it opens."""
    done = run(
        "def main():\n"
        "    print('nowhere')\n"
        "    number = os.open(os.devnull, os.O_RDONLY)\n"
        "    return 0 if number > 2 else 3",
        redirect=">&-",
    )

    assert (done.returncode, done.stderr) == (0, "")


def test_other_endings_are_left_alone() -> None:
    """Exit codes and tracebacks of the work itself."""
    assert run("def main():\n    return 7").returncode == 7
    assert run("def main():\n    sys.exit('told')").stderr == "told\n"
    assert "ValueError: wrong" in run("def main():\n    raise ValueError('wrong')").stderr
