"""Bytes on disks in the cell's status: what storages say beside what the core knows."""

from __future__ import annotations

import pytest

from services.scheduler import disk_usage
from services.scheduler.disk_usage import DiskUsage
from shared.messages.status import CellStatus, Heartbeat, Kind, OwnerBytes


def beat(storage: str, owned: dict[str, int], *, kind: Kind = "storage", is_gone: bool = False) -> Heartbeat:
    return Heartbeat(kind=kind, id=storage, incarnation="one", owned_bytes=owned, is_gone=is_gone)


def a_status(*storages: str, rows: tuple[OwnerBytes, ...] = ()) -> CellStatus:
    return CellStatus(
        scheduler_id="s", epoch=1, seq=1, model="m", page_size=16, queued=0, running=0, max_queued=1, max_context=1,
        storages=storages, owner_bytes=rows,
    )  # fmt: skip


def test_disks_are_added_to_what_the_core_knows() -> None:
    """By owner, over all storages, each with what it said last."""
    usage = DiskUsage()
    usage.note(beat("one", {"": 1, "a": 99}))
    usage.note(beat("one", {"": 5, "a": 10}))
    usage.note(beat("two", {"": 7, "a": 20, "b": 3}))
    rows = (OwnerBytes(owner="", device=1), OwnerBytes(owner="a", device=2, host=3))

    told = usage.told(a_status("one", "two", rows=rows)).owner_bytes

    assert told == (
        OwnerBytes(owner="", device=1, disk=12),
        OwnerBytes(owner="a", device=2, host=3, disk=30),
        OwnerBytes(owner="b", disk=3),
    )


def test_a_storage_that_left_is_forgotten() -> None:
    """Also by the next status in which it is a member again."""
    usage = DiskUsage()
    usage.note(beat("one", {"": 5}))

    assert usage.told(a_status()).owner_bytes == ()
    assert usage.told(a_status("one")).owner_bytes == ()


def test_nobody_else_speaks_of_disks() -> None:
    """Neither a worker of the same name, nor the word of somebody's end."""
    usage = DiskUsage()
    usage.note(beat("one", {"": 5}, kind="worker"))
    usage.note(beat("one", {"": 5}, is_gone=True))

    assert usage.told(a_status("one")).owner_bytes == ()


def test_rows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not fit is told with the rest."""
    monkeypatch.setattr(disk_usage, "OWNERS_TOLD", 2)
    usage = DiskUsage()
    usage.note(beat("one", {"": 1, "a": 2, "b": 3, "c": 4}))

    told = {row.owner: row.disk for row in usage.told(a_status("one")).owner_bytes}

    assert told == {"": 5, "a": 2, "b": 3}
