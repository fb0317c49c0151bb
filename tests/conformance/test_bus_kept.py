"""Answers that are kept for a while, within bounds."""

from __future__ import annotations

import pytest

from shared.bus.protocol import Bus, StreamLimits
from shared.errors import Unavailable
from tests.conformance.brokers import World, retried


async def test_every_client_reads_what_was_kept(world: World, bus: Bus) -> None:
    """Once it is acknowledged; a name that nobody wrote has nothing."""
    other = await world.connect("second")
    await bus.keep("owner.salt.one", b"first")

    assert await other.kept("owner.salt.one") == b"first"
    assert await other.kept("owner.salt.two") is None


async def test_what_is_forgotten_is_gone(world: World, bus: Bus) -> None:
    """By one name, or by all that begin alike; the number of entries is told."""
    for name in ("a.x.1", "a.x.2", "a.y.1", "b.x.1"):
        await bus.keep(name, name.encode())

    assert await bus.forget("a.x.1") == 1
    assert await bus.forget("a.x.1") == 0
    assert await bus.forget("a.>") == 2
    assert await bus.kept("a.y.1") is None
    assert await bus.kept("b.x.1") == b"b.x.1"
    assert await bus.forget("*.x.>") == 1


async def test_the_oldest_go_first(world: World) -> None:
    """When there are more than the bound."""
    bus = await world.connect("first")
    await bus.ensure_streams(StreamLimits(kept_entries=3))
    for number in range(5):
        await bus.keep(f"a.x.{number}", b"kept")

    assert [await bus.kept(f"a.x.{number}") for number in range(5)] == [None, None, b"kept", b"kept", b"kept"]


async def test_a_client_sees_how_full_the_bucket_is(world: World) -> None:
    """What is stored, and the bounds."""
    bus = await world.connect("first")
    await bus.ensure_streams(StreamLimits(kept_bytes=2**20, kept_entries=7))
    empty = await bus.kept_room()
    for number in range(3):
        await bus.keep(f"a.x.{number}", b"k" * 1000)
    filled = await bus.kept_room()

    assert (empty.nbytes, empty.entries, empty.most_bytes, empty.most_entries) == (0, 0, 2**20, 7)
    assert 3000 <= filled.nbytes < 4000
    assert filled.entries == 3


async def test_without_a_bucket_nothing_is_kept(world: World) -> None:
    """Writing fails, and reading finds nothing."""
    bus = await world.connect("first")

    with pytest.raises(Unavailable):
        await bus.keep("a.x.1", b"kept")
    with pytest.raises(Unavailable):
        await bus.kept_room()
    assert await bus.kept("a.x.1") is None
    assert await bus.forget("a.>") == 0


async def test_what_is_kept_outlives_the_broker(world: World, bus: Bus) -> None:
    """While it is away every call fails."""
    await bus.keep("a.x.1", b"kept")
    await world.break_connections()
    with pytest.raises(Unavailable):
        await bus.kept("a.x.1")
    with pytest.raises(Unavailable):
        await bus.keep("a.x.2", b"kept")
    await world.restore_connections()

    assert await retried(lambda: bus.kept("a.x.1")) == b"kept"
