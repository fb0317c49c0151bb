"""The read speed of the disk tier, for the cell to plan with from the first request on.

The directories may have been measured before: by ``thermocline doctor --profile --disk-dir``, or by this storage at an
earlier start. Otherwise they are measured here, once, within seconds. A disk that cannot be measured is used all the
same.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Container
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TypeVar

from services.storage.config import StorageConfig
from shared import logs, progress
from shared.disk_speed import LARGE_BYTES, DiskFigures, measure_disk, remember, remembered
from shared.errors import ConfigError

FILE_BYTES = 64 * 2**20
LEAST_BYTES = 4 * LARGE_BYTES
ROOM_SHARE = 8
"""Fraction of the free space that a file may take: an eighth."""

MEASURE_S = 15.0
"""Longest wait for one file system. A disk that hangs is not measured, and its storage joins without."""

_log = logs.get_logger("storage")

R = TypeVar("R")


def disk_bytes_per_s(
    config: StorageConfig, measure: Callable[..., DiskFigures] = measure_disk, *, left_out: Container[str] = ()
) -> float:
    """Return the bytes a second of all directories together, but those ``left_out``; 0 where that is not known.

    Blocking, for at most ``MEASURE_S`` for each file system. Directories of one file system are read no faster than one
    of them. A disk with a read limit is not measured here, to spare it.
    """
    may_measure = config.measure_at_start and not config.disk_read_bytes_per_s
    speeds: dict[int, float] = {}  # By file system.
    for path in config.disk_dir:
        if os.path.abspath(path) in left_out:
            continue  # The tier reports why.
        directory = Path(path)
        try:
            device, found = _in_time(partial(_known, directory))
            if device in speeds:
                continue
            if found is None and may_measure:
                found = _measured(directory, measure)
        except (ConfigError, OSError) as error:
            reason = str(error) or f"it took longer than {MEASURE_S:.0f} s"
            _log.warning("disk_not_measured", directory=path, reason=reason)
            return 0.0
        if found is None:
            return 0.0
        speeds[device] = found.read_bytes_per_s
    return sum(speeds.values())


def _known(directory: Path) -> tuple[int, DiskFigures | None]:
    """Return the file system of a directory, and the figures measured before. Raises OSError."""
    return os.stat(directory).st_dev, remembered(directory)


def _measured(directory: Path, measure: Callable[..., DiskFigures]) -> DiskFigures:
    """Measure a directory's disk and remember the figures. Raises ConfigError, or OSError."""

    def work() -> DiskFigures:
        found = measure(directory, file_bytes=_file_bytes(directory))
        remember(found)
        return found

    with progress.phase("measuring the disk"):
        found = _in_time(work)
    _log.info("disk_measured", directory=str(directory), read_bytes_per_s=round(found.read_bytes_per_s))
    return found


def _in_time(function: Callable[[], R]) -> R:
    """Return the function's result. Raises what it raises, and TimeoutError if it takes longer than ``MEASURE_S``."""
    result: Future[R] = Future()

    def work() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    # A thread of its own that the end of the process does not wait for: a call into a disk that hangs never returns.
    threading.Thread(target=work, name="measure-disk", daemon=True).start()
    return result.result(MEASURE_S)


def _file_bytes(directory: Path) -> int:
    """Return the size of the file to measure with.

    Raises ConfigError without room for it, OSError without an answer.
    """
    system = os.statvfs(directory)
    room = system.f_bavail * system.f_frsize // ROOM_SHARE
    if room < LEAST_BYTES:
        raise ConfigError(f"an eighth of its free space is {room} bytes, and {LEAST_BYTES} are needed")
    return min(FILE_BYTES, room // LARGE_BYTES * LARGE_BYTES)
