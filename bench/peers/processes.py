"""A peer's process: started in a group of its own, waited for, its log kept, and ended with all its children."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from bench.peers.processor_time import read_processes, trees
from thermocline.supervisor.log_tail import tail

START_S = 900.0
"""vLLM compiles for most of a minute when it starts for the first time, and far longer on busy cores."""

_STOP_S, _REST_STOP_S = 30.0, 10.0  # Of a process, and then of what it started.
_POLL_S = 0.2
_POLL_TIMEOUT_S = 5.0
_CALL_S = 60.0
_LOG_LINES = 30
_SHARED, _GONE = "/dev/shm/", "(deleted)"


class PeerFailed(Exception):
    """A peer did not start, ended by itself, or refused what it has to be asked."""


class Process:
    """A process that runs and everything that it started."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.pid = popen.pid
        self._popen = popen
        self._log = log

    def wait_until_serving(self, url: str, timeout_s: float = START_S) -> None:
        """Wait until ``url`` answers with status 200. Raises PeerFailed with the end of its log."""
        deadline_s = time.monotonic() + timeout_s
        with httpx.Client(
            timeout=_POLL_TIMEOUT_S, trust_env=False
        ) as client:  # Making one costs more than all that it asks.
            while time.monotonic() < deadline_s:
                if self._popen.poll() is not None:
                    raise PeerFailed(f"{self.name} ended with exit code {self._popen.returncode}\n{self.log_tail()}")
                try:
                    if client.get(url).status_code == httpx.codes.OK:
                        return
                except httpx.TransportError:
                    pass  # It does not listen yet.
                time.sleep(_POLL_S)
        raise PeerFailed(f"{self.name} does not serve after {timeout_s:.0f} s\n{self.log_tail()}")

    def log_tail(self) -> str:
        return tail(self._log, _LOG_LINES)

    def stop(self) -> None:
        """Ask it to end; whatever of its group is left after a while is killed, and shared memory is let go."""
        segments = segments_of(trees(read_processes(), [self.pid]))
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGTERM)
            try:
                self._popen.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                pass  # Killed with the rest.
        try:
            os.killpg(self.pid, signal.SIGTERM)
            deadline_s = time.monotonic() + _REST_STOP_S
            while time.monotonic() < deadline_s:
                os.killpg(self.pid, 0)
                time.sleep(_POLL_S)
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # All of it has ended.
        self._popen.wait()
        for segment in segments:
            segment.unlink(missing_ok=True)


def segments_of(pids: Sequence[int]) -> set[Path]:
    """Files of shared memory that these processes map, and OpenMP's. Not every peer removes its own when it ends."""
    found = set()
    for pid in pids:
        found |= set(Path(_SHARED).glob(f"__KMP_REGISTERED_LIB_{pid}_*"))
        try:
            lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue  # It ended while we looked.
        found |= {Path(line[line.index(_SHARED) :]) for line in lines if _SHARED in line and not line.endswith(_GONE)}
    return found


@contextmanager
def process(name: str, argv: Sequence[str], environ: Mapping[str, str], folder: Path) -> Iterator[Process]:
    """A process for the duration of the block; ``folder`` takes its log and is where it runs."""
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        popen = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **environ},
            cwd=folder,
            process_group=0,
        )
    running = Process(name, popen, log)
    try:
        yield running
    finally:
        running.stop()


def call(url: str) -> bytes:
    """POST without a body, and what came back. Raises PeerFailed unless the status is 200."""
    try:
        response = httpx.post(url, timeout=_CALL_S)
    except httpx.TransportError as error:
        raise PeerFailed(f"POST {url}: {error}") from error
    if response.status_code != httpx.codes.OK:
        raise PeerFailed(f"POST {url}: status {response.status_code}: {response.text[:500]}")
    return response.content
