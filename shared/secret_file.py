"""Files of secrets: read whole or not at all, and refused when others could have read or written them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import aiofiles.os

from shared.errors import ConfigError

BY_OTHERS = stat.S_IRWXO
BY_GROUP = stat.S_IRWXG
WRITTEN_BY_GROUP = stat.S_IWGRP

Version = tuple[int, int, int, int]
"""Identity and times of a file, which differ after every change."""

T = TypeVar("T")


def version_of(path: Path) -> Version | None:
    """Return a file's version; None without a file, or where it cannot be accessed."""
    try:
        status = path.stat()
    except OSError:
        return None
    return _version(status)


async def look_at(path: Path) -> Version | None:
    """Return :func:`version_of` for coroutines: a file system that hangs blocks no other coroutine."""
    try:
        return _version(await aiofiles.os.stat(path))
    except OSError:
        return None


def read_secrets(
    path: Path, flag: str, parse: Callable[[str, str], T], *, forbidden: int, max_bytes: int
) -> tuple[Version, T]:
    """Return the file's version and the result of ``parse(text, name)``.

    ``forbidden`` are mode bits for which the file is refused; ``name`` is the ``flag`` that named it and its path, for
    errors. Raises FileNotFoundError, or ConfigError with all faults at once.
    """
    name = f"{flag} {path}"
    try:
        # By the open file and not by its name, so that the checked file is the one that is read.
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            raw = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from error
    faults = []
    if status.st_mode & forbidden:
        uses, mode = _uses(status.st_mode & forbidden, forbidden), stat.S_IMODE(status.st_mode)
        faults.append(f"{name} can be {uses} (mode {mode:o}); chmod 600 it")
    if len(raw) > max_bytes:
        raise ConfigError("; ".join([*faults, f"{name} is larger than {max_bytes} bytes"]))
    try:
        found = parse(raw.decode(), name)
    except UnicodeDecodeError:
        faults.append(f"{name} is not UTF-8")
    except ConfigError as error:
        faults.append(error.message)
    if faults:
        raise ConfigError("; ".join(faults))
    return _version(status), found


def _uses(found: int, forbidden: int) -> str:
    by_group = "used" if forbidden & BY_GROUP == BY_GROUP else "written"
    uses = [f"{by_group} by its group"] if found & BY_GROUP else []
    return " or ".join([*uses, *(["used by others"] if found & BY_OTHERS else [])])


def _version(status: os.stat_result) -> Version:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
