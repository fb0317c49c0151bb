"""Quotas in the object store hold after a restart, before any order has come."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from services.storage.core.remote_shares import RemoteShares
from services.storage.remote_owners import OWNERS_FILE, RemoteOwners

A, B = "aa" * 16, "bb" * 16


async def _kept(directories: list[Path], *learnt: tuple[str, str, int]) -> None:
    """What a storage leaves behind that was told so."""
    owners = RemoteOwners(RemoteShares(), [str(directory) for directory in directories])
    task = asyncio.create_task(owners.run())
    await asyncio.sleep(0)
    for each in learnt:
        owners.learn(*each)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _loaded(directories: list[Path], *learnt: tuple[str, str, int]) -> dict[str, tuple[str, int]]:
    """What the next one knows, which an order may have told something already."""
    shares = RemoteShares()
    owners = RemoteOwners(shares, [str(directory) for directory in directories])
    for each in learnt:
        owners.learn(*each)
    await owners.load()
    return shares.bounded()


async def test_owners_with_a_quota_are_known_after_a_restart(tmp_path: Path) -> None:
    """With the quota that was told last; one without a quota need not be."""
    await _kept([tmp_path], (A, "acme", 100), (B, "other", 0), (A, "acme", 200))

    assert await _loaded([tmp_path]) == {A: ("acme", 200)}
    assert (tmp_path / OWNERS_FILE).stat().st_mode & 0o777 == 0o600


async def test_an_order_of_this_start_is_newer(tmp_path: Path) -> None:
    """A quota that was lifted meanwhile stays lifted."""
    await _kept([tmp_path], (A, "acme", 100), (B, "other", 50))

    assert await _loaded([tmp_path], (A, "acme", 0)) == {B: ("other", 50)}


async def test_one_directory_of_two_is_enough(tmp_path: Path) -> None:
    """One that is gone, or holds nonsense, is passed over; of two that differ, the later one counts."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    await _kept([first, second], (A, "acme", 100))
    second.mkdir()
    from_one = await _loaded([second, first])
    await _kept([second], (A, "acme", 300))
    os.utime(first / OWNERS_FILE, (1, 1))
    from_both = await _loaded([second, first])
    (second / OWNERS_FILE).write_bytes(b"{")
    with_nonsense = await _loaded([second, first])

    assert from_one == with_nonsense == {A: ("acme", 100)}
    assert from_both == {A: ("acme", 300)}


async def test_nothing_is_written_while_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every save and fetch says whose it is."""
    await _kept([tmp_path], (A, "acme", 100))
    monkeypatch.setattr("services.storage.remote_owners._write", lambda files, owned: pytest.fail("written"))

    shares = RemoteShares()
    owners = RemoteOwners(shares, [str(tmp_path)])
    await owners.load()
    task = asyncio.create_task(owners.run())
    await asyncio.sleep(0)
    owners.learn(A, "acme", 100)
    owners.learn(B, "other", 0)
    task.cancel()
    (ended,) = await asyncio.gather(task, return_exceptions=True)

    assert isinstance(ended, asyncio.CancelledError)
