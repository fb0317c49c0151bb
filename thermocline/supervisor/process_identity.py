"""Tells a process from another that later got its number: a pid together with its start time."""

from __future__ import annotations

import os

from shared.memory.segment_name import process_start_time


def start_time(pid: int) -> int:
    """Return the process's start in clock ticks after boot; 0 if it is gone or only its zombie is left."""
    return process_start_time(pid) or 0


def is_same_process(pid: int, started: int) -> bool:
    """Whether ``pid`` still is the process that started at ``started`` ticks."""
    return pid > 0 and started > 0 and start_time(pid) == started


def own_identity() -> tuple[int, int]:
    """Return this process's pid and start time."""
    return os.getpid(), start_time(os.getpid())
