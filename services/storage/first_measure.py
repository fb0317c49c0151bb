"""The read speed of the disk tier, for the cell to plan with from the first request on.

The directories may have been measured before: by ``thermocline doctor --profile --disk-dir``, or by this storage at an
earlier start. Otherwise they are measured here, once, within seconds. A disk that cannot be measured is used all the
same.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

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


def disk_bytes_per_s(config: StorageConfig, measure: Callable[..., DiskFigures] = measure_disk) -> float:
    """Return the bytes a second of all directories together; 0 where that is not known.

    Blocking, for at most ``MEASURE_S`` for each file system. Directories of one file system are read no faster than one
    of them. A disk with a read limit is not measured here, to spare it.
    """
    may_measure = config.measure_at_start and not config.disk_read_bytes_per_s
    speeds = []
    for directory in _one_of_each_file_system(config.disk_dir):
        found = remembered(directory)
        if found is None and may_measure:
            found = _measured(directory, measure)
        if found is None:
            return 0.0
        speeds.append(found.read_bytes_per_s)
    return sum(speeds)


def _one_of_each_file_system(paths: tuple[str, ...]) -> Iterator[Path]:
    """Yield one usable directory of each file system."""
    seen = set()
    for path in paths:
        try:
            device = os.stat(path).st_dev
        except OSError:
            continue  # The tier leaves it out too, and reports why.
        if device not in seen:
            seen.add(device)
            yield Path(path)


def _measured(directory: Path, measure: Callable[..., DiskFigures]) -> DiskFigures | None:
    """Measure a directory's disk and remember the figures; None, with a line in the log, where that fails."""
    found: list[DiskFigures] = []
    faults: list[str] = []

    def work() -> None:
        try:
            found.append(measure(directory, file_bytes=_file_bytes(directory)))
            remember(found[0])
        except ConfigError as error:
            faults.append(error.message)
        except OSError as error:
            faults.append(str(error))

    # A thread of its own that the end of the process does not wait for: a call into a disk that hangs never returns.
    thread = threading.Thread(target=work, name="measure-disk", daemon=True)
    with progress.phase("measuring the disk"):
        thread.start()
        thread.join(MEASURE_S)
    if not found:
        reason = faults[0] if faults else f"it took longer than {MEASURE_S:.0f} s"
        _log.warning("disk_not_measured", directory=str(directory), reason=reason)
        return None
    _log.info("disk_measured", directory=str(directory), read_bytes_per_s=round(found[0].read_bytes_per_s))
    return found[0]


def _file_bytes(directory: Path) -> int:
    """Return the size of the file to measure with.

    Raises ConfigError without room for it, OSError without an answer.
    """
    system = os.statvfs(directory)
    room = system.f_bavail * system.f_frsize // ROOM_SHARE
    if room < LEAST_BYTES:
        raise ConfigError(f"an eighth of its free space is {room} bytes, and {LEAST_BYTES} are needed")
    return min(FILE_BYTES, room // LARGE_BYTES * LARGE_BYTES)
