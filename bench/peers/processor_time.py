"""Processor time of processes with all their children, and waiting until a server does nothing any more."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
"""Of processor time, as a :data:`Table` counts it."""

_QUIET_PART = 0.10
_WINDOW_S = 0.5
_LONGEST_S = 60.0

Table = dict[int, tuple[int, int]]
"""Of processes by their pid: the parent, and ticks of processor time."""


def parse_stat(line: str) -> tuple[int, int]:
    """Parent and ticks used, of a line of ``/proc/PID/stat``; a command's name may hold spaces and brackets."""
    fields = line.rpartition(")")[2].split()
    return int(fields[1]), int(fields[11]) + int(fields[12])


def trees(processes: Table, roots: Sequence[int]) -> list[int]:
    """The pids of ``roots`` that live, and of everything below them."""
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in processes.items():
        children.setdefault(parent, []).append(pid)
    found, waiting = [], [pid for pid in roots if pid in processes]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += children.get(pid, [])
    return found


def read_processes() -> Table:
    """All that live now."""
    processes = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                processes[int(folder.name)] = parse_stat((folder / "stat").read_text(encoding="utf-8"))
            except (FileNotFoundError, ProcessLookupError):
                pass  # It ended while we looked.
    return processes


def used_s(roots: Sequence[int]) -> float:
    """Seconds of processor time that the living processes of these trees have used."""
    processes = read_processes()
    return sum(processes[pid][1] for pid in trees(processes, roots)) / TICKS_PER_S


def settle(roots: Sequence[int]) -> None:
    """Wait until these have used less than a tenth of a core for half a second, a minute at the most.

    What a server does after its answers, such as copies to a disk, is over then.
    """
    deadline_s = time.monotonic() + _LONGEST_S
    before_s, began_s = used_s(roots), time.monotonic()
    while began_s < deadline_s:
        time.sleep(_WINDOW_S)
        now_s = time.monotonic()
        after_s = used_s(roots)
        if after_s - before_s < _QUIET_PART * (now_s - began_s):
            return
        before_s, began_s = after_s, now_s


def drop_from_page_cache(folder: Path) -> None:
    """Let go of what the kernel holds of the files below ``folder``, so that reading them reads the disk."""
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
