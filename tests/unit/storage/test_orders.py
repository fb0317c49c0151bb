"""Orders that could not be carried out at once."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from services.storage import orders
from services.storage.orders import Orders
from shared.errors import ConfigError
from shared.messages.pools import KvGeometry, PoolHandle
from shared.messages.storage_events import HostPoolCreated
from shared.messages.storage_plans import CreateHostPool, StoragePlan

GEOMETRY = KvGeometry(layers=1, kv_heads=1, head_dim=8, page_size=16, dtype="float32")


class FullPools:
    """Pools for which there is no room at the first tries."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals

    def create_host(self, geometry: KvGeometry) -> PoolHandle:
        self.refusals -= 1
        if self.refusals >= 0:
            raise ConfigError("no room")
        return PoolHandle(kind="shm", layout="page_first", name="p", nbytes=1, pages=1, geometry=geometry)


class Told:
    """The events of a storage, and what its tiers were opened with."""

    def __init__(self) -> None:
        self.events: list[HostPoolCreated] = []
        self.opened = asyncio.Event()

    async def put_when_room(self, event: HostPoolCreated) -> None:
        self.events.append(event)

    def open(self, geometry: KvGeometry, *, is_read_in_part: bool) -> None:
        self.opened.set()


@pytest.mark.parametrize("refusals", [0, 1, 3])
async def test_a_pool_without_room_is_made_once_there_is_some(refusals: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal is told once, and the pool when it is there."""
    monkeypatch.setattr(orders, "RETRY_FIRST_S", 0.0)
    told = cast(Any, Told())
    nothing = cast(Any, None)
    carried = Orders(
        cast(Any, FullPools(refusals)),
        nothing,
        nothing,
        told,
        nothing,
        told,
        storage_id="s",
        incarnation="i",
        release=lambda: None,
    )
    retrying = asyncio.create_task(carried.run())
    order = CreateHostPool(geometry=GEOMETRY)

    await carried.execute(StoragePlan(storage_id="s", incarnation="i", number=1, epoch=1, cause=1, order=order))
    await told.opened.wait()
    retrying.cancel()

    said = [event.error for event in told.events]
    assert said == (["no room", ""] if refusals else [""])
    assert told.events[-1].handle is not None
