"""Each trial in a process of its own, with a bound on memory and time: a model type cannot take the others with it."""

from __future__ import annotations

import json
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from bench.model_support.trial import Outcome

_MEMORY_BYTES = 4 * 2**30
_REAL_TIME = 30


def bounded(trial: Callable[[Path], Outcome], *, cpu_s: int) -> Outcome:
    """What ``trial`` finds, given a folder for its files, in a copy of this process.

    The copy has the library imported already. It may take 4 GiB more memory than this process has, and ``cpu_s`` of
    processor time; in real time, which depends on what else the machine does, it may take 30 times that.
    """
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory(prefix="model-support-") as folder:
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _run(trial, Path(folder), writing, cpu_s)
        os.close(writing)
        answer, status = _wait(pid, reading, cpu_s * _REAL_TIME)
    if answer:
        return Outcome(**json.loads(answer))
    if status is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)):
        return Outcome("untried", f"a tiny model of it took more than {cpu_s} s of processor time")
    return Outcome("crashed", f"its process ended with status {status}")


def _run(trial: Callable[[Path], Outcome], folder: Path, writing: int, cpu_s: int) -> None:
    """Ends this process."""
    try:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        taken = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (taken + _MEMORY_BYTES,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
        try:
            found = trial(folder)
        except Exception as error:
            # What is neither a refusal nor a fault of the library's own run would end a worker.
            found = Outcome("crashed", f"{type(error).__name__}: {error}")
        os.write(writing, json.dumps(asdict(found)).encode()[:60_000])
    finally:
        os._exit(0)


def _wait(pid: int, reading: int, timeout_s: float) -> tuple[bytes, int | None]:
    """What the process wrote, and its status; None where it was ended here."""
    deadline, answer = time.monotonic() + timeout_s, b""
    os.set_blocking(reading, False)
    try:
        while True:
            try:
                answer += os.read(reading, 65_536)
            except BlockingIOError:
                pass
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                try:
                    answer += os.read(reading, 65_536)
                except BlockingIOError:
                    pass
                return answer, status
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return answer, None
            time.sleep(0.02)
    finally:
        os.close(reading)
