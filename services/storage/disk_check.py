"""Checks of the tiers below host memory that are possible before a storage starts.

A storage that starts by itself refuses on a fault, and so does ``thermocline up`` before it starts anything. Once a
cell has been ready, a storage that is started again serves without the missing parts, and reports them
(``tier_watch.py``).
"""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Callable, Sequence

from services.storage.backends.directory_lock import holder
from services.storage.backends.disk_directory import LOCK_FILE
from services.storage.backends.remote_location import parse_remote
from services.storage.config import StorageConfig
from shared.errors import ConfigError
from shared.sizes import size

ENDING_S = 1.0
"""Wait for the directories of a killed storage, which are released when the kernel has freed its memory."""

_POLL_S = 0.05
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

_OF_THE_DISK = ("disk_kv_bytes", "disk_read_bytes_per_s", "sparse")


def tier_faults(config: StorageConfig, whose: Callable[[str], str] = lambda process: "") -> list[str]:
    """Return every fault of the tiers' settings on this machine; empty where there is none. Blocking.

    ``whose`` describes a process, given by its id, that holds a directory.
    """
    faults = []
    if not config.disk_dir:
        default = StorageConfig()
        faults += [
            f"--{name.replace('_', '-')} is of no use without --disk-dir"
            for name in _OF_THE_DISK
            if getattr(config, name) != getattr(default, name)
        ]
    for path in config.disk_dir:
        fault = _directory_fault(path, whose)
        if fault:
            faults.append(f"--disk-dir {path} {fault}")
    if config.disk_dir and not faults:
        faults += _quota_faults(config.disk_dir, config.disk_kv_bytes)
    if config.remote:
        try:
            parse_remote(config.remote)
        except ConfigError as error:
            faults.append(error.message)
    return faults


def check_tiers(config: StorageConfig) -> None:
    """Check the tiers' settings. Raises ConfigError with every fault. Blocking."""
    faults = tier_faults(config)
    if faults:
        raise ConfigError("; ".join(faults))


def _directory_fault(path: str, whose: Callable[[str], str]) -> str:
    """Return why a directory cannot be used; "" if it can."""
    try:
        if not os.path.isdir(path):
            return "is not a directory" if os.path.lexists(path) else "does not exist"
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            return "is on a file system that is mounted read-only"
        # Whether root may write shows only by writing.
        with tempfile.TemporaryFile(dir=path):
            pass
        process = _holder(os.path.join(path, LOCK_FILE))
    except OSError as error:
        return "" if error.errno in _NO_ROOM else f"cannot be written to: {error.strerror}"
    if not process:
        return ""
    more = whose(process)
    return f"is in use by process {process}{f' ({more})' if more else ''}: every storage needs directories of its own"


def _holder(path: str) -> str:
    """Return ``directory_lock.holder``'s answer, but wait a moment for a process that is about to end."""
    deadline_s = time.monotonic() + ENDING_S
    while (process := holder(path)) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    return process


def _quota_faults(paths: Sequence[str], quota: int) -> list[str]:
    """Return a fault for a quota that is larger than the file systems: no eviction could make room for it."""
    try:
        systems = {os.stat(path).st_dev: os.statvfs(path) for path in paths}
    except OSError as error:
        return [f"--disk-dir {', '.join(paths)} cannot be used: {error.strerror}"]
    total = sum(system.f_blocks * system.f_frsize for system in systems.values())
    if quota <= total:
        return []
    where = "the file system" if len(systems) == 1 else f"the {len(systems)} file systems"
    return [
        f"--disk-kv-bytes is {size(quota)}, and {where} of --disk-dir {', '.join(paths)} has {size(total)} in all: "
        "choose less"
    ]
