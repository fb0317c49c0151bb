"""The identity of a process: its pid and its start time, which differs after the pid is reused."""

from __future__ import annotations

import os

from shared.memory.segment_name import process_start_time


def start_time(pid: int) -> int:
    """Return a process's start in clock ticks after boot; 0 if it has ended or is a zombie."""
    return process_start_time(pid) or 0


def is_same_process(pid: int, started: int) -> bool:
    """Return whether ``pid`` is still the process that started at ``started`` ticks."""
    return pid > 0 and started > 0 and start_time(pid) == started


def own_identity() -> tuple[int, int]:
    """Return this process's pid and start time."""
    return os.getpid(), start_time(os.getpid())
