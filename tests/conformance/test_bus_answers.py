"""The bucket of answers: the latest entry of a name, for everybody, for as long as there is room."""

from __future__ import annotations

import pytest

from shared.bus.protocol import Bus
from shared.errors import Unavailable
from tests.conformance.brokers import World, retried

NAME, OTHER = "0" * 32, "f" * 32


async def test_every_client_reads_what_was_written_last(world: World, bus: Bus) -> None:
    """An entry may be of any bytes, and takes the place of the one before; a name that nobody wrote has none."""
    other = await world.connect("second")
    assert await other.read_answers([NAME], timeout_s=5.0) == {NAME: None}
    assert await other.read_answers([], timeout_s=5.0) == {}
    for number in range(3):
        await bus.write_answer(NAME, bytes([0, 10, 13, 255, number]))

    assert await other.read_answers([OTHER, NAME], timeout_s=5.0) == {OTHER: None, NAME: bytes([0, 10, 13, 255, 2])}


async def test_many_are_read_at_once(bus: Bus) -> None:
    """More than are under way at a time."""
    names = [f"{number:032x}" for number in range(200)]
    for name in names[::2]:
        await bus.write_answer(name, name.encode())

    read = await bus.read_answers(names, timeout_s=30.0)

    assert read == {name: name.encode() if place % 2 == 0 else None for place, name in enumerate(names)}


async def test_answers_outlive_the_broker(world: World, bus: Bus) -> None:
    """While it is away reading and writing fail."""
    await bus.write_answer(NAME, b"said")
    await world.break_connections()
    with pytest.raises(Unavailable):
        await bus.read_answers([NAME], timeout_s=0.5)
    with pytest.raises(Unavailable):
        await bus.write_answer(NAME, b"more", timeout_s=0.5)
    await world.restore_connections()

    async def found() -> int:
        return len((await bus.read_answers([NAME], timeout_s=1.0))[NAME] or b"")

    assert await retried(found) == len(b"said")
