"""A process beside each that runs tests: it bounds their memory, and clears up if they end without doing so.

A test that hangs ends its process by ``os._exit`` (pytest-timeout's method ``thread``), a test that eats memory and a
run that is killed end it by SIGKILL. Brokers and cells that were started by tests live on then, and segments stay in
/dev/shm, unless another process looks after them. This one watches with nothing but the standard library.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

LOOK_S = 0.25
MOST_BYTES = 6 * 2**30
"""Private memory that a process of tests may have."""

_STAT_PAGE = os.sysconf("SC_PAGE_SIZE")
_RESOURCE_TRACKER = b"multiprocessing.resource_tracker"


class Guard:
    """A running guard, as the process that it guards sees it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @classmethod
    def start(cls, variable: str, run: str, *, most_bytes: int = MOST_BYTES) -> Guard:
        """Guard this process, whose children have ``variable`` set to ``run``."""
        command = [sys.executable, "-I", __file__, str(os.getpid()), variable, run, str(most_bytes)]
        # A session of its own, so that Ctrl-C does not end it before what it guards.
        return cls(subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, env={"PATH": os.defpath}))

    def tell(self, what: str, value: str) -> None:
        """Say which test begins (``test``), or where cells write themselves down (``runs``)."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{what} {value}".replace("\n", " ").encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # Killed by somebody; tests go on without.

    def dismiss(self) -> None:
        """End it: this process has cleared up itself."""
        self.tell("done", "")
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=20)


def processes_of(variable: str, run: str) -> dict[int, str]:
    """Living processes with ``variable`` set to ``run`` when they were started, by pid, with their command lines."""
    found = {}
    mark = f"{variable}={run}".encode()
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            is_ours = mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
            command = Path(f"/proc/{entry}/cmdline").read_bytes() if is_ours else b""
        except OSError:
            continue  # It has ended, or it is another user's.
        # Python's own tracker ends by itself, after it has removed what dead processes left.
        if command and _RESOURCE_TRACKER not in command:
            found[int(entry)] = command.replace(b"\0", b" ").decode(errors="replace").strip()
    return found


def segments_of(run: str, owners: set[int]) -> list[str]:
    """Names in /dev/shm with a prefix of ``run``, or that one of ``owners`` has made."""
    found = []
    for name in sorted(os.listdir("/dev/shm")):
        parts = name.split(".")
        if name.startswith(f"{run}-") or (len(parts) == 4 and parts[1].split("-")[0] in map(str, owners)):
            found.append(name)
    return found


def remove_segments(names: list[str]) -> None:
    """Remove these names from /dev/shm."""
    for name in names:
        Path("/dev/shm", name).unlink(missing_ok=True)


def _private_bytes(pid: int) -> int:
    """Resident memory of a process that it shares with nothing; 0 if it has ended."""
    try:
        resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * _STAT_PAGE


def _say(line: str) -> None:
    print(f"tests: {line}", file=sys.stderr, flush=True)


class _Watch:
    """One process of tests, and what it has told."""

    def __init__(self, pid: int, most_bytes: int) -> None:
        self.pid = pid
        self.told = {"test": "no test"}
        self._most_bytes = most_bytes
        self._rest = b""

    def until_it_ends(self) -> bool:
        """Wait for its end; whether it has cleared up."""
        looked = time.monotonic()
        while os.getppid() == self.pid:
            if select.select([0], [], [], LOOK_S)[0] and not self._hear():
                break
            if "done" in self.told:
                return True
            if time.monotonic() - looked >= LOOK_S:
                looked = time.monotonic()
                self._bound_memory()
        while select.select([0], [], [], 0)[0] and self._hear():
            pass  # What it told just before.
        return "done" in self.told

    def _hear(self) -> bool:
        data = os.read(0, 65536)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            what, _, value = line.decode().partition(" ")
            self.told[what] = value
        return bool(data)

    def _bound_memory(self) -> None:
        taken = _private_bytes(self.pid)
        if taken > self._most_bytes:
            _say(f"{self.told['test']} took {taken:,} bytes of memory, more than {self._most_bytes:,}: killed")
            os.kill(self.pid, signal.SIGKILL)


def _clear_up(variable: str, run: str, pid: int, runs: str) -> None:
    """End the processes of a run that is gone, and remove its segments and cells."""
    owners = {pid}
    while living := processes_of(variable, run):
        owners |= set(living)
        for other, command in living.items():
            _say(f"{run} left process {other}, ended now: {command[:200]}")
            try:
                os.kill(other, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        time.sleep(0.05)
    remove_segments(segments_of(run, owners))
    if runs:
        sys.path.insert(0, str(Path(__file__).parents[1]))
        from thermocline.supervisor.leftovers import reap_dead_cells

        reap_dead_cells(Path(runs))


def main(pid: int, variable: str, run: str, most_bytes: int) -> None:
    """Watch ``pid`` until it ends."""
    watch = _Watch(pid, most_bytes)
    if not watch.until_it_ends():
        _say(f"a process of tests ended in {watch.told['test']}")
        _clear_up(variable, run, pid, watch.told.get("runs", ""))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
