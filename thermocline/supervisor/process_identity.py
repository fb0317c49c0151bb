"""The identity of a process: its pid and its start time, which differs after the pid is reused.

A pid means a process only in one place: since one start of the machine, and in one namespace of pids.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import msgspec

from shared import variables
from shared.memory.segment_name import process_start_time


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where pids are valid. ``boot_id`` differs after a restart of the machine, ``pid_namespace`` among containers."""

    boot_id: str
    pid_namespace: int
    host_name: str


def own_place() -> Place:
    """Return the place of this process; "" and 0 stand for what the kernel does not tell."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot_id = ""
    try:
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        namespace = 0
    return Place(boot_id=boot_id, pid_namespace=namespace, host_name=platform.node())


def start_time(pid: int) -> int:
    """Return a process's start in clock ticks after boot; 0 if it has ended or is a zombie."""
    return process_start_time(pid) or 0


def is_same_process(pid: int, started: int) -> bool:
    """Return whether ``pid`` is still the process that started at ``started`` ticks."""
    return pid > 0 and started > 0 and start_time(pid) == started


def is_child_of(pid: int, supervisor_pid: int) -> bool:
    """Return whether ``pid`` was started by that supervisor, by its environment; False where that cannot be read."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"{variables.SUPERVISED}={supervisor_pid}".encode() in environ.split(b"\0")


def own_identity() -> tuple[int, int]:
    """Return this process's pid and start time."""
    return os.getpid(), start_time(os.getpid())
