"""The lock on a data folder, by which a cell shows that it runs.

The kernel drops it when its process ends, however it ends, and shows it to every container that shares the folder.
"""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import TextIO

from shared.errors import ConfigError, reason_of

LOCK_NAME = "lock"


def lock_data_dir(data_dir: Path) -> TextIO:
    """Lock the data folder for this process until the file is closed.

    Raises ConfigError if another cell runs in it, or if this user cannot lock it.
    """
    path = data_dir / LOCK_NAME
    try:
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot lock {path}: {reason_of(error)}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if isinstance(error, BlockingIOError):
            raise ConfigError(f"another cell runs in {data_dir}") from error
        raise ConfigError(f"cannot lock {path}: {reason_of(error)}") from error
    return file


def lock_of_ended(data_dir: Path) -> TextIO | None:
    """Lock the folder of a cell that has ended; return None while it runs, or where its lock cannot be tried.

    Raises FileNotFoundError where the folder has no lock.
    """
    try:
        file = (data_dir / LOCK_NAME).open("r+", encoding="utf-8")
    except FileNotFoundError:
        raise
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file
