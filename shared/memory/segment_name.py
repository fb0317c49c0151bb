"""Names of shared segments, which tell their owner: ``<prefix>.<owner pid>-<start time>.<kind>.<random>``.

A process id alone is reused by the kernel; together with the process's start time (clock ticks since boot,
field 22 of ``/proc/<pid>/stat``) it names one process permanently.
"""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError

_PART = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NAME = re.compile(r"([A-Za-z0-9_-]{1,64})\.(\d{1,10})-(\d{1,20})\.([A-Za-z0-9_-]{1,64})\.([0-9a-f]{8})")


@dataclass(frozen=True, slots=True)
class SegmentName:
    """The parts of a segment's name."""

    prefix: str
    owner_pid: int
    owner_started: int
    kind: str
    random: str

    def __str__(self) -> str:
        """Return the name of the file in /dev/shm."""
        return f"{self.prefix}.{self.owner_pid}-{self.owner_started}.{self.kind}.{self.random}"

    def owner_is_alive(self) -> bool:
        """Return whether the process that made the segment still runs, as far as this PID namespace sees."""
        return process_start_time(self.owner_pid) == self.owner_started


def new_segment_name(prefix: str, kind: str) -> SegmentName:
    """Return a fresh name owned by this process.

    Raises ConfigError for a prefix or kind that no file name may have, and without /proc.
    """
    for part, value in (("shm prefix", prefix), ("segment kind", kind)):
        if not _PART.fullmatch(value):
            raise ConfigError(f"{part} {value!r} may only have letters, digits, _ and -, and 64 of them at most")
    pid = os.getpid()
    started = process_start_time(pid)
    if started is None:
        raise ConfigError("cannot read this process's start time from /proc: is /proc mounted?")
    return SegmentName(prefix, pid, started, kind, secrets.token_hex(4))


def parse_segment_name(name: str) -> SegmentName | None:
    """Return the parts of ``name``, or None if it is not a name of ours."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return SegmentName(match[1], int(match[2]), int(match[3]), match[4], match[5])


def process_start_time(pid: int) -> int | None:
    """Return the clock ticks since boot at which ``pid`` started; None without such a process, or for a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    # The command (field 2) is in parentheses and may itself hold spaces and parentheses.
    fields = stat[stat.rfind(")") + 1 :].split()
    if fields[0] in ("Z", "X"):
        return None
    return int(fields[19])
