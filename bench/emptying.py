"""Between two questions of a TTFT bench: wait until nothing runs or moves, and empty tiers by an order."""

from __future__ import annotations

import asyncio
from uuid import uuid4

from services.gateway.cache_calls import CacheCalls
from shared import subjects
from shared.bus.protocol import Bus
from shared.codec import decode, encode
from shared.messages.cell_events import FlushCache
from shared.messages.status import CellStatus, GetInventory, Inventory


async def rest(bus: Bus, *, seq: int = 0) -> CellStatus:
    """Wait until there is a host pool, nothing runs or moves, uploads included, and ``seq`` is folded."""
    async with asyncio.timeout(120):
        while True:
            status = await CacheCalls(bus).status()
            leased = sum(pool.leased for pool in status.pools)
            is_idle = not (status.running or status.queued or leased or status.fetches or status.saves)
            has_host = any(pool.tier == "host" for pool in status.pools)
            if has_host and is_idle and status.seq >= seq and not await _behind(bus, status):
                return status
            await asyncio.sleep(0.02)


async def _behind(bus: Bus, status: CellStatus) -> int:
    """What the storages still do behind everybody's back."""
    outstanding = 0
    for name in status.storages:
        answer = await bus.call(subjects.rpc("storage", "inventory", name), encode(GetInventory()))
        counters = decode(answer, Inventory).counters
        outstanding += sum(count for key, count in counters.items() if key.endswith("_outstanding"))
    return outstanding


async def empty(bus: Bus, tiers: tuple[str, ...]) -> None:
    """Drop what nothing uses from these tiers, and wait until nothing moves any more."""
    order = FlushCache(call_id=uuid4().hex, tiers=tiers)
    await rest(bus, seq=await bus.append(subjects.cell_input(), encode(order), message_id=order.call_id))
