"""What is wrong with the tiers below host memory, as far as it can be known before a storage starts.

A storage that starts by itself refuses on that, and so does ``thermocline up`` before it starts anything. Once a cell
has been ready, a storage that is started again serves without what is missing, and says so (``tier_watch.py``).
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
"""A storage that was killed lets go of its directories when the kernel has taken its memory apart."""

_POLL_S = 0.05
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)

_OF_THE_DISK = ("disk_kv_bytes", "disk_read_bytes_per_s", "sparse")


def tier_faults(config: StorageConfig, whose: Callable[[str], str] = lambda process: "") -> list[str]:
    """Every fault of the settings, beside what is there now; empty where there is none. Blocking.

    ``whose`` says more of a process, given by its id, that holds a directory.
    """
    faults = []
    if not config.disk_dir:
        faults += [
            f"--{name.replace('_', '-')} is of no use without --disk-dir"
            for name in _OF_THE_DISK
            if getattr(config, name) != _default(name)
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


def _default(name: str) -> object:
    return getattr(StorageConfig(), name)


def _directory_fault(path: str, whose: Callable[[str], str]) -> str:
    """Why a directory cannot be used; "" if it can."""
    try:
        if not os.path.isdir(path):
            return "is not a directory" if os.path.lexists(path) else "does not exist"
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            return "is on a file system that is mounted read-only"
        # Whether root may write is only found out by writing.
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
    """As ``directory_lock.holder``, but a process that is about to end has a moment for it."""
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
