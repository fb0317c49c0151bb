"""Rotation of logs: each process's file is copied and truncated when it is long.

The processes go on appending to their open file. Lines that are written between copy and truncation are lost: those
of some milliseconds, once in many hours.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

from shared import logs

MOST_BYTES = 64 * 1024**2
KEPT = 3
"""Older parts of each log: ``.1`` is the newest."""

EVERY_S = 30.0

_log = logs.get_logger("supervisor.logs")


async def rotate_for_ever(folder: Path) -> None:
    """Rotate the logs of a folder every EVERY_S seconds; failures are logged and never raised."""
    while True:
        try:
            await asyncio.to_thread(rotate, folder)
        except OSError as error:
            _log.warning("logs_not_rotated", folder=str(folder), reason=str(error))
        await asyncio.sleep(EVERY_S)


def rotate(folder: Path, most_bytes: int = MOST_BYTES) -> list[Path]:
    """Move the contents of each ``*.log`` above ``most_bytes`` to ``*.log.1``; return those logs.

    Raises OSError where there is no room for a copy: the older parts are then as they were.
    """
    long = [path for path in sorted(folder.glob("*.log")) if path.stat().st_size > most_bytes]
    for path in long:
        copy = path.with_name(f"{path.name}.partial")
        try:
            shutil.copyfile(path, copy)
        except OSError:
            copy.unlink(missing_ok=True)
            raise
        for number in range(KEPT - 1, 0, -1):
            older = _part(path, number)
            if older.exists():
                older.replace(_part(path, number + 1))
        copy.replace(_part(path, 1))
        os.truncate(path, 0)
    return long


def _part(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
