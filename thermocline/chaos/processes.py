"""What ``/proc`` and ``/dev/shm`` say about the cell's processes: memory, zombies, leftovers. Linux only."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shared.memory.segment import SHM_DIRECTORY
from shared.memory.segment_name import parse_segment_name

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """One process of the system."""

    pid: int
    parent: int
    group: int
    state: str  # One letter as in /proc/<pid>/stat: R, S, D, T, Z ...


def facts_of(pid: int) -> ProcessFacts | None:
    """Read ``/proc/<pid>/stat``; return None if there is no such process."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # The command's name may hold spaces and parentheses; what follows the last parenthesis does not.
    fields = text[text.rfind(")") + 2 :].split()
    return ProcessFacts(pid, int(fields[1]), int(fields[2]), fields[0])


def all_facts() -> list[ProcessFacts]:
    """Return the facts of every process on the machine, in order of pids."""
    pids = sorted(int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())
    return [facts for facts in map(facts_of, pids) if facts is not None]


def zombies() -> list[int]:
    """Return the pids of children and grandchildren of this process that ended and were not waited for."""
    found = all_facts()
    mine = {facts.pid for facts in found if facts.parent == os.getpid()}
    return [f.pid for f in found if f.state == "Z" and (f.parent == os.getpid() or f.parent in mine)]


def survivors(groups: Iterable[int], living: Iterable[int]) -> list[int]:
    """Return the pids in process groups of dead children: processes that they started and did not end."""
    dead = set(groups) - set(living)
    return [facts.pid for facts in all_facts() if facts.group in dead and facts.state != "Z"]


def private_bytes(pid: int) -> int | None:
    """Return the private memory of a process in bytes, swapped or not; None if it is gone.

    Pools in shared memory are left out: their size is fixed, and they are resident once touched.
    """
    try:
        lines = (_PROC / str(pid) / "status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    sizes = {key: value for key, _, value in (line.partition(":") for line in lines)}
    if "RssAnon" not in sizes:
        return None  # A zombie has no memory.
    return sum(int(sizes[key].split()[0]) * 1024 for key in ("RssAnon", "VmSwap") if key in sizes)


def segments(prefix: str) -> list[str]:
    """Return the sorted names of the cell's shared segments."""
    return sorted(path.name for path in SHM_DIRECTORY.iterdir() if path.name.startswith(prefix + "."))


def orphaned_segments(prefix: str) -> list[str]:
    """Return the names of the cell's shared segments whose owner is dead."""
    return [name for name in segments(prefix) if (parsed := parse_segment_name(name)) and not parsed.owner_is_alive()]
