"""The record of a running cell: other processes find it by this, and the next start cleans up after it.

The record is in the data folder as ``cell.json`` and, so that a start with another data folder finds it too,
as ``<shm prefix>.json`` in this user's folder of runs.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from shared.undecodable import UNDECODABLE
from thermocline.broker.secret_files import write_secret

RECORD_NAME = "cell.json"


class ChildRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One child; its start time ``started`` distinguishes it from a later process with the same pid."""

    name: str
    pid: int
    started: int
    state: str
    restarts: int = 0


class CellRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One running cell, its supervisor (the owner) and its children. It contains secrets."""

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


def runs_dir() -> Path:
    """Return this user's folder of records; create it with mode 0700 if missing."""
    path = Path(tempfile.gettempdir()) / f"thermocline-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def write_record(record: CellRecord, paths: tuple[Path, ...]) -> None:
    """Replace each of ``paths`` by ``record`` atomically, with mode 0600."""
    text = msgspec.json.format(msgspec.json.encode(record), indent=2).decode()
    for path in paths:
        # The address of an embedded broker holds the operator's password, and the key opens the page.
        write_secret(path, text)


def read_record(path: Path) -> CellRecord | None:
    """Return the record at ``path``; None if it is missing or this release cannot read it."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=CellRecord)
    except (OSError, *UNDECODABLE):
        return None


def all_records(folder: Path) -> Iterator[tuple[Path, CellRecord]]:
    """Yield every readable record in the folder with its path, in order of names."""
    for path in sorted(folder.glob("*.json")):
        record = read_record(path)
        if record is not None:
            yield path, record
