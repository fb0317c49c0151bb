"""When snapshots are tried."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.scheduler import snapshot_keeper
from services.scheduler.snapshot_keeper import SnapshotKeeper
from shared.errors import Unavailable


async def test_one_that_failed_is_not_tried_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that is away is away for each of them, and the log would be full of it."""
    tried: list[float] = []
    slept: list[float] = []
    sleep = asyncio.sleep

    async def take(self: SnapshotKeeper) -> Any:
        tried.append(len(slept))
        raise Unavailable("the broker is away")

    async def sleeping(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(SnapshotKeeper, "take", take)
    monkeypatch.setattr(SnapshotKeeper, "_is_due", lambda self: True)
    monkeypatch.setattr("services.scheduler.snapshot_keeper.asyncio.sleep", sleeping)
    running = asyncio.ensure_future(SnapshotKeeper.run(object.__new__(SnapshotKeeper)))
    while len(tried) < 3:
        await sleep(0)
    running.cancel()

    assert tried == [1, 3, 5]
    assert slept[:4] == [snapshot_keeper.CHECK_S, snapshot_keeper.RETRY_S] * 2
