"""The record of a running cell: other processes find it by this, and the next start cleans up after it.

The record is in the data folder as ``cell.json`` and, so that a start with another data folder finds it too,
as ``<shm prefix>.json`` in this user's folder of runs.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from shared.errors import ConfigError, reason_of
from shared.undecodable import UNDECODABLE
from thermocline.broker.secret_files import write_secret
from thermocline.supervisor.process_identity import Place

RECORD_NAME = "cell.json"

_CURE = "choose another folder with TMPDIR"


class ChildRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One child; its start time ``started`` distinguishes it from a later process with the same pid."""

    name: str
    pid: int
    started: int
    state: str
    restarts: int = 0


class CellRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One running cell, its supervisor (the owner) and its children. It contains secrets.

    Pids are those of ``place``; None, in records of earlier releases, is this one.
    """

    owner_pid: int
    owner_started: int
    base_url: str
    nats_url: str
    data_dir: str
    data_dir_is_temporary: bool
    shm_prefix: str
    admin_key: str = ""  # The gateway's, if it was drawn for this run.
    is_ready: bool = False
    children: tuple[ChildRecord, ...] = ()
    place: Place | None = None


def runs_dir() -> Path:
    """Return this user's folder of records; create it with mode 0700 if missing.

    Records name processes to kill and folders to remove, so a folder that another user could have written to is not
    trusted. Raises ConfigError for such a folder, and where there can be none.

    It is not in ``XDG_RUNTIME_DIR``: shells, services and containers of one user differ in whether they have it, and
    would not find one another's cells; and it is removed at logout.
    """
    try:
        path = Path(tempfile.gettempdir()) / f"thermocline-{os.getuid()}"
    except FileNotFoundError as error:
        raise ConfigError(f"no folder for records of cells: {reason_of(error)}; {_CURE}") from error
    try:
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            pass
        found = path.lstat()
    except OSError as error:
        raise ConfigError(f"cannot keep records of cells in {path}: {reason_of(error)}; {_CURE}") from error
    fault = _distrust(found)
    if fault:
        raise ConfigError(f"cannot keep records of cells in {path}: {fault}; {_CURE}")
    return path


def _distrust(found: os.stat_result) -> str:
    if not stat.S_ISDIR(found.st_mode):
        return "it is not a directory"
    if found.st_uid != os.getuid():
        return f"it belongs to user {found.st_uid}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "other users can write to it"
    return ""


def write_record(record: CellRecord, paths: tuple[Path, ...]) -> None:
    """Replace each of ``paths`` by ``record`` atomically, with mode 0600."""
    text = msgspec.json.format(msgspec.json.encode(record), indent=2).decode()
    for path in paths:
        # The address of an embedded broker holds the operator's password, and the key opens the page.
        write_secret(path, text)


def read_record(path: Path) -> CellRecord | None:
    """Return the record at ``path``; None if it is missing, not a file of this user, or of an unknown format."""
    try:
        # Without O_NONBLOCK a pipe would be waited for.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
                return None
            return msgspec.json.decode(file.read(), type=CellRecord)
    except (OSError, *UNDECODABLE):
        return None


def all_records(folder: Path) -> Iterator[tuple[Path, CellRecord]]:
    """Yield every readable record in the folder with its path, in order of names."""
    for path in sorted(folder.glob("*.json")):
        record = read_record(path)
        if record is not None:
            yield path, record
