"""A process that writes chunks and is killed at a given point, as often as it is told, each time in a fresh fork.

Reads one JSON object a line: ``paths``; ``how`` and ``at``: ``before``, ``within`` or ``after`` system call number
``at`` of the tier, ``output`` when so many bytes of answers were read, ``never``. Answers with what the child had
acknowledged (``P3`` chunk 3 is durable, ``d3`` its deletion begins, ``D3`` it is deleted), how it ended, and its
calls. Imports little, so that forks are quick.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from services.storage.backends.disk import DiskBackend
from services.storage.backends.file_calls import FileCalls
from shared import logs
from tests.chunk_makers import aligned, make_chain

COUNT = 10
DELETED = (1, 3)
WRITERS = 3
TIMEOUT_S = 60.0

CHUNKS = make_chain(COUNT, seed=51)


class MortalCalls(FileCalls):
    """Ends the process at one of its calls, as ``kill -9`` would."""

    def __init__(self, how: str, at: int) -> None:
        self._how, self._at = how, at
        self.made: list[str] = []

    def _reach(self, what: str) -> bool:
        """Count a call; whether it is the one."""
        self.made.append(what)
        is_the_one = len(self.made) - 1 == self._at
        if is_the_one and self._how == "before":
            _die()
        return is_the_one

    def _leave(self, is_the_one: bool) -> None:
        if is_the_one and self._how == "after":
            _die()

    def open(self, path: str, flags: int) -> int:
        is_the_one = self._reach("open")
        fd = super().open(path, flags)
        self._leave(is_the_one)
        return fd

    def close(self, fd: int) -> None:
        is_the_one = self._reach("close")
        super().close(fd)
        self._leave(is_the_one)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        is_the_one = self._reach("write")
        if is_the_one and self._how == "within":
            super().write(fd, data[: data.nbytes // 2], offset)
            _die()
        count = super().write(fd, data, offset)
        self._leave(is_the_one)
        return count

    def sync_data(self, fd: int) -> None:
        is_the_one = self._reach("sync_data")
        super().sync_data(fd)
        self._leave(is_the_one)

    def make_directory(self, path: str) -> None:
        is_the_one = self._reach("make_directory")
        super().make_directory(path)
        self._leave(is_the_one)

    def rename(self, source: str, target: str) -> None:
        is_the_one = self._reach("rename")
        super().rename(source, target)
        self._leave(is_the_one)

    def unlink(self, path: str) -> None:
        is_the_one = self._reach("unlink")
        super().unlink(path)
        self._leave(is_the_one)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _say(fd: int, word: str) -> None:
    os.write(fd, f"{word}\n".encode("ascii"))


def _write_chunks(paths: list[str], calls: MortalCalls, answers: int, writers: int) -> None:
    backend = DiskBackend(paths, calls=calls)

    def write(place: int) -> None:
        backend.put(CHUNKS[place].key, CHUNKS[place].blob, stripe=place, timeout_s=TIMEOUT_S)
        _say(answers, f"P{place}")
        if place in DELETED:
            _say(answers, f"d{place}")
            backend.delete(CHUNKS[place].key, timeout_s=TIMEOUT_S)
            _say(answers, f"D{place}")
        backend.get(CHUNKS[place].key, aligned(CHUNKS[place].blob.nbytes), timeout_s=TIMEOUT_S)

    if writers == 1:
        for place in range(COUNT):
            write(place)
    else:
        with ThreadPoolExecutor(writers) as executor:
            list(executor.map(write, range(COUNT)))
    backend.close()


def run_once(paths: list[str], how: str, at: int) -> dict[str, Any]:
    """Fork, write, die; what the child said, the signal that ended it, and the calls that it made if none did."""
    reading, answers = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        calls = MortalCalls(how, at)
        # Threads only where the parent kills: at a numbered call they would make each run another one.
        _write_chunks(paths, calls, answers, WRITERS if how == "output" else 1)
        _say(answers, "calls " + " ".join(calls.made))
        os._exit(0)
    os.close(answers)
    said = b""
    while piece := os.read(reading, 4096):
        said += piece
        if how == "output" and len(said) >= at:
            # It may have ended by itself meanwhile; until it is waited for, the id is its own.
            os.kill(child, signal.SIGKILL)
    os.close(reading)
    _, status = os.waitpid(child, 0)
    words = said.decode("ascii").splitlines()
    made = [word for word in words if word.startswith("calls")]
    return {
        "said": [word for word in words if not word.startswith("calls")],
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0,
        "status": os.WEXITSTATUS(status) if os.WIFEXITED(status) else -1,
        "calls": made[0].split()[1:] if made else [],
    }


def main() -> None:
    logs.configure("storage", "crash", level="error")
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(run_once(order["paths"], order["how"], order["at"])), flush=True)


if __name__ == "__main__":
    main()
