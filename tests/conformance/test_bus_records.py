"""Records that are replaced by compare-and-set."""

from __future__ import annotations

import asyncio

import pytest

from shared.bus.protocol import Bus
from shared.errors import Unavailable
from tests.conformance.brokers import World, retried


async def test_record_that_nobody_wrote_is_none(bus: Bus) -> None:
    """It can be made, but not replaced."""
    assert await bus.read_record("scheduler") is None
    assert await bus.write_record("scheduler", b"mine", revision=7) is None
    assert await bus.read_record("scheduler") is None


async def test_every_client_reads_what_was_written_last(world: World, bus: Bus) -> None:
    """With the revision that the writer was told."""
    other = await world.connect("second")
    first = await bus.write_record("scheduler", b"one", revision=0)
    assert first is not None
    second = await bus.write_record("scheduler", b"two", revision=first)
    read = await other.read_record("scheduler")

    assert read is not None
    assert (read.revision, read.data) == (second, b"two")
    assert second is not None
    assert second > first > 0


async def test_write_on_an_outdated_revision_changes_nothing(world: World, bus: Bus) -> None:
    """Whoever was overtaken is told so."""
    other = await world.connect("second")
    first = await bus.write_record("scheduler", b"one", revision=0)
    assert first is not None
    await other.write_record("scheduler", b"two", revision=first)

    assert await bus.write_record("scheduler", b"late", revision=first) is None
    assert await bus.write_record("scheduler", b"anew", revision=0) is None
    read = await bus.read_record("scheduler")
    assert read is not None
    assert read.data == b"two"


async def test_of_many_who_write_at_once_one_succeeds(world: World, bus: Bus) -> None:
    """For the first record as for every later one."""
    rivals = [await world.connect(f"rival-{number}") for number in range(5)]
    revision = 0
    for _ in range(20):
        written = await asyncio.gather(
            *(
                rival.write_record("scheduler", str(number).encode(), revision=revision)
                for number, rival in enumerate(rivals)
            )
        )
        winners = [number for number, won in enumerate(written) if won is not None]
        read = await bus.read_record("scheduler")

        assert len(winners) == 1
        assert read is not None
        assert (read.revision, read.data) == (written[winners[0]], str(winners[0]).encode())
        revision = read.revision


async def test_names_do_not_meet(bus: Bus) -> None:
    """A write of one leaves the revision of another as it was."""
    one = await bus.write_record("one", b"1", revision=0)
    await bus.write_record("two", b"2", revision=0)

    assert one is not None
    assert await bus.write_record("one", b"1b", revision=one) is not None
    read = await bus.read_record("two")
    assert read is not None
    assert read.data == b"2"


async def test_record_outlives_the_broker(world: World, bus: Bus) -> None:
    """While it is away reading and writing fail; behind it everything goes on at the same revision."""
    first = await bus.write_record("scheduler", b"one", revision=0)
    assert first is not None
    await world.break_connections()
    with pytest.raises(Unavailable):
        await bus.read_record("scheduler", timeout_s=0.5)
    with pytest.raises(Unavailable):
        await bus.write_record("scheduler", b"two", revision=first, timeout_s=0.5)
    await world.restore_connections()

    async def written() -> int:
        return await bus.write_record("scheduler", b"two", revision=first) or 0

    assert await retried(written) > first
