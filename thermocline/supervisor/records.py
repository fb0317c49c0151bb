"""What a running cell writes down about itself: for others to find it, and for the next start to clean up after it.

The record lies in the data folder as ``cell.json`` and, so that a start with another data folder finds it too,
as ``<shm prefix>.json`` in this user's folder of runs.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from shared.undecodable import UNDECODABLE

RECORD_NAME = "cell.json"


class ChildRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One child: ``started`` is its start time, which tells it from a later process with the same pid."""

    name: str
    pid: int
    started: int
    state: str
    restarts: int = 0


class CellRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One running cell."""

    owner_pid: int
    owner_started: int
    base_url: str
    nats_url: str
    data_dir: str
    data_dir_is_temporary: bool
    shm_prefix: str
    admin_key: str = ""  # Of the gateway, where this run has drawn one.
    is_ready: bool = False
    children: tuple[ChildRecord, ...] = ()


def runs_dir() -> Path:
    """Return this user's folder of runs, made if missing; only its owner may read it."""
    path = Path(tempfile.gettempdir()) / f"thermocline-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def write_record(record: CellRecord, paths: tuple[Path, ...]) -> None:
    """Replace each of ``paths`` by ``record``; a reader sees the old record or the new one, whole."""
    data = msgspec.json.format(msgspec.json.encode(record), indent=2)
    for path in paths:
        partial = path.with_suffix(".part")
        partial.unlink(missing_ok=True)
        # The address of an embedded broker holds the operator's password, and the key opens the page.
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        partial.replace(path)


def read_record(path: Path) -> CellRecord | None:
    """Return the record at ``path``, or None if there is none that this release can read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=CellRecord)
    except (OSError, *UNDECODABLE):
        return None


def all_records(folder: Path) -> Iterator[tuple[Path, CellRecord]]:
    """Every readable record in the folder of runs, by name."""
    for path in sorted(folder.glob("*.json")):
        record = read_record(path)
        if record is not None:
            yield path, record
