"""How a client ends."""

from __future__ import annotations

import asyncio

import pytest

from shared.bus.protocol import Bus, Delivery
from shared.errors import Unavailable
from tests.conformance.brokers import Collected, World
from tests.waiting import until


async def test_handlers_of_what_has_arrived_finish_before_the_bus_closes(world: World, bus: Bus) -> None:
    """Closing drains: queued messages are handled, and their handlers may still publish."""
    other = await world.connect("second")
    release = asyncio.Event()
    collected, seen = Collected(), Collected()

    async def forward(delivery: Delivery) -> None:
        await release.wait()
        await other.publish("tc.status", delivery.data)

    await bus.subscribe("tc.status", collected)
    await other.subscribe("tc.tokens.gw", forward)
    await other.subscribe("tc.tokens.gw", seen)
    for data in (b"1", b"2", b"3"):
        await bus.publish("tc.tokens.gw", data)
    await until(lambda: len(seen.deliveries) == 3)
    closing = asyncio.create_task(other.close())
    await asyncio.sleep(0)
    release.set()
    await asyncio.wait_for(closing, 20)
    await until(lambda: len(collected.deliveries) == 3)

    assert collected.data == [b"1", b"2", b"3"]


async def test_close_is_idempotent_and_final(bus: Bus) -> None:
    """What arrived is still handled; afterwards the bus is Unavailable."""
    collected = Collected()
    await bus.subscribe("tc.tokens.gw", collected)

    await bus.close()
    await bus.close()

    assert not bus.is_connected
    with pytest.raises(Unavailable):
        await bus.publish("tc.tokens.gw", b"")
    with pytest.raises(Unavailable):
        bus.publish_now("tc.tokens.gw", b"")
