"""What a broken connection costs, and what survives it."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from shared import subjects
from shared.bus.protocol import Bus, Delivery
from shared.errors import Unavailable
from tests.conformance.brokers import Collected, World, retried
from tests.waiting import until


async def test_everything_is_unavailable_while_disconnected(world: World, bus: Bus) -> None:
    """No operation hangs or buffers while the broker is away; callbacks tell of both changes."""
    told: list[str] = []
    bus.on_disconnect(lambda: told.append("lost"))
    bus.on_reconnect(lambda: told.append("back"))

    await world.break_connections()
    with pytest.raises(Unavailable):
        await bus.publish("tc.tokens.gw", b"")
    with pytest.raises(Unavailable):
        await bus.append("tc.in.cell", b"")
    with pytest.raises(Unavailable):
        await bus.call("tc.rpc.scheduler.status", b"")
    with pytest.raises(Unavailable):
        await bus.get_object("core-1")
    with pytest.raises(Unavailable):
        await bus.flush()
    await until(lambda: told == ["lost"])
    await world.restore_connections()
    await until(lambda: told == ["lost", "back"])

    assert bus.is_connected


async def test_subscriptions_and_calls_survive_a_lost_connection(world: World, bus: Bus) -> None:
    """After the reconnect everything works as before."""
    other = await world.connect("second")
    collected = Collected()
    heard: list[Delivery] = []

    async def echo(data: bytes) -> bytes:
        return data

    await other.subscribe("tc.tokens.gw", collected)
    await other.hear("tc.tokens.gw", heard.append)
    await other.serve("tc.rpc.echo", echo)

    await world.break_connections()
    await world.restore_connections()
    await bus.flush()
    await other.flush()
    await bus.publish("tc.tokens.gw", b"after")
    await until(lambda: bool(collected.deliveries and heard))

    assert collected.data == [delivery.data for delivery in heard] == [b"after"]
    assert await bus.call("tc.rpc.echo", b"hello", timeout_s=10.0) == b"hello"


async def test_follow_resumes_by_sequence_without_gap_or_repeat(world: World, bus: Bus) -> None:
    """Over three lost connections a follower sees each message once, in order."""
    other = await world.connect("second")
    seen: list[int] = []

    async def follow() -> None:
        async for message in other.follow(subjects.INPUTS_STREAM):
            seen.append(message.seq)

    following = asyncio.create_task(follow())
    total = 0
    for _ in range(3):
        for _ in range(30):
            total += 1
            number = str(total)
            await retried(partial(bus.append, "tc.in.cell", number.encode(), message_id=number))
        await world.break_connections()
        await world.restore_connections()
    for _ in range(30):
        total += 1
        number = str(total)
        await retried(partial(bus.append, "tc.in.cell", number.encode(), message_id=number))
    await until(lambda: len(seen) >= total, timeout_s=60.0)
    following.cancel()

    assert seen == list(range(1, total + 1))


async def test_retried_append_is_stored_once_across_a_lost_connection(world: World, bus: Bus) -> None:
    """The same message_id before and after the broker's death is one message."""
    first = await bus.append("tc.in.cell", b"a", message_id="one")

    await world.break_connections()
    await world.restore_connections()
    again = await retried(lambda: bus.append("tc.in.cell", b"a", message_id="one"))

    assert (first, again) == (1, 1)
