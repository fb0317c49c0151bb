"""The bucket of objects."""

from __future__ import annotations

from shared.bus.protocol import Bus
from tests.conformance.brokers import World


async def test_objects_are_kept_replaced_and_deleted(world: World, bus: Bus) -> None:
    """The bucket holds whole objects beyond max_payload, by name, for every client."""
    other = await world.connect("second")
    large = bytes(range(256)) * 1024
    empty = await bus.list_objects()

    await bus.put_object("core-2", large)
    await bus.put_object("core-1", b"old")
    await bus.put_object("core-1", b"new")
    names = await other.list_objects()

    assert empty == []
    assert names == ["core-1", "core-2"]
    assert await other.get_object("core-1") == b"new"
    assert await other.get_object("core-2") == large
    assert await other.get_object("core-3") is None
    await other.delete_object("core-1")
    await other.delete_object("core-1")
    await other.delete_object("never-there")
    assert await bus.list_objects() == ["core-2"]
    assert await bus.get_object("core-1") is None


async def test_empty_object_is_an_object(bus: Bus) -> None:
    """Zero bytes are not the same as none."""
    await bus.put_object("nothing", b"")

    assert await bus.get_object("nothing") == b""
