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
    """None if there is no such process."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # The command's name may hold spaces and parentheses; what follows the last parenthesis does not.
    fields = text[text.rfind(")") + 2 :].split()
    return ProcessFacts(pid, int(fields[1]), int(fields[2]), fields[0])


def all_facts() -> list[ProcessFacts]:
    """Every process, by pid."""
    pids = sorted(int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())
    return [facts for facts in map(facts_of, pids) if facts is not None]


def zombies() -> list[int]:
    """Children of this process, or of its children, that ended and were not waited for."""
    found = all_facts()
    mine = {facts.pid for facts in found if facts.parent == os.getpid()}
    return [f.pid for f in found if f.state == "Z" and (f.parent == os.getpid() or f.parent in mine)]


def survivors(groups: Iterable[int], living: Iterable[int]) -> list[int]:
    """Return processes in the process groups of dead children: what they started and did not end."""
    dead = set(groups) - set(living)
    return [facts.pid for facts in all_facts() if facts.group in dead and facts.state != "Z"]


def private_bytes(pid: int) -> int | None:
    """Resident memory that the process does not share, swapped or not; None if it is gone.

    Pools in shared memory are left out: they are as large as they were made, and resident once they were touched.
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
    """Names of the cell's shared segments."""
    return sorted(path.name for path in SHM_DIRECTORY.iterdir() if path.name.startswith(prefix + "."))


def orphaned_segments(prefix: str) -> list[str]:
    """Those of them whose owner is dead."""
    return [name for name in segments(prefix) if (parsed := parse_segment_name(name)) and not parsed.owner_is_alive()]
