"""Checks of the folders that a cell writes to: its data folder and the folder of records."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from services.storage.checks import directory_faults

LEAST_FREE_BYTES = 1024**2
"""Room without which a cell does not start: the broker's streams begin with less, and any log fills it."""


def folder_faults(flag: str, path: Path) -> list[str]:
    """Return why a cell cannot keep files in ``path``, which may still be missing; ``flag`` is what chose it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return [f"{flag} {os.fsencode(path)!r}: its name is not UTF-8, and neither the broker nor records can name it"]
    faults = directory_faults(flag, [str(path)])
    free = free_bytes(path)
    if not faults and free is not None and free < LEAST_FREE_BYTES:
        faults.append(f"{flag} {path}: the disk is full ({free:,} bytes are free, {LEAST_FREE_BYTES:,} are needed)")
    return faults


def free_bytes(path: Path) -> int | None:
    """Return the room for this user where ``path`` is or will be; None where the system does not tell."""
    there = next((one for one in (path.absolute(), *path.absolute().parents) if one.exists()), Path("/"))
    try:
        usage = shutil.disk_usage(there)
    except OSError:
        return None
    return usage.free if usage.total else None
