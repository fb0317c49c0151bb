"""Snapshots in the bucket, and whether the stream can be continued from them."""

from __future__ import annotations

import msgspec
import pytest

from services.scheduler import core
from services.scheduler.fold import Fold
from services.scheduler.snapshots import (
    KEPT,
    Snapshot,
    SnapshotStore,
    belongs_to_stream,
    decode_snapshot,
    encode_snapshot,
    object_name,
    take_snapshot,
)
from shared import subjects
from shared.bus.protocol import StreamLimits
from shared.errors import RecordingError
from tests.memory_bus import MemoryBroker, MemoryBus


def snapshot(seq: int, time_ns: int = 0) -> Snapshot:
    return take_snapshot(Fold(core.new_state(), position=seq, time_ns=time_ns))


async def connected(inputs: int = 0) -> tuple[MemoryBroker, MemoryBus]:
    """A stream whose input ``n`` has the timestamp ``n * 1000``."""
    times = iter(range(1000, 10**6, 1000))
    broker = MemoryBroker(clock=lambda: next(times))
    bus = broker.connect("scheduler")
    await bus.ensure_streams(StreamLimits())
    for _ in range(inputs):
        await bus.append("tc.in.cell", b"")
    return broker, bus


def test_snapshot_survives_encoding() -> None:
    """What comes back is what was taken."""
    taken = snapshot(7, 8)

    assert decode_snapshot(encode_snapshot(taken)) == taken


@pytest.mark.parametrize("change", [{"version": 99}, {"digest": 1}, {"state": b"other"}])
def test_damaged_snapshot_is_refused(change: dict[str, object]) -> None:
    """Neither another version nor a wrong digest is used."""
    damaged = encode_snapshot(msgspec.structs.replace(snapshot(7), **change))

    with pytest.raises(RecordingError):
        decode_snapshot(damaged)


async def test_newest_snapshots_are_kept() -> None:
    """Putting deletes all but the newest ones."""
    _, bus = await connected()
    store = SnapshotStore(bus)

    for seq in (5, 10, 20, 100, 1000):
        await store.put(seq, encode_snapshot(snapshot(seq)))

    kept = [found.seq async for found in store.newest_first()]
    assert kept == [1000, 100, 20]
    assert len(kept) == KEPT
    assert [found.seq async for found in store.oldest_first()] == [20, 100, 1000]


async def test_damaged_objects_are_passed_over() -> None:
    """A reader finds the older ones behind a torn one."""
    _, bus = await connected()
    store = SnapshotStore(bus)
    await store.put(1, encode_snapshot(snapshot(1)))
    await bus.put_object(object_name(2), b"torn")
    await bus.put_object("something else", b"")

    assert [found.seq async for found in store.newest_first()] == [1]


@pytest.mark.parametrize(
    ("seq", "time_ns", "expected"),
    [
        (0, 0, False),  # the stream begins at 3
        (1, 1000, False),
        (2, 2000, True),  # the next input is the first stored one
        (2, 3001, False),  # the next input would be older than the snapshot
        (4, 4000, True),
        (4, 4001, False),  # another stream's input 4
        (5, 5000, True),
        (6, 6000, False),  # ahead of the stream
    ],
)
async def test_snapshot_fits_only_its_own_stream(seq: int, time_ns: int, expected: bool) -> None:
    """Sequence and timestamp tell whether what follows in the stream follows the snapshot."""
    broker, bus = await connected(5)
    broker.drop_oldest(subjects.INPUTS_STREAM, 2)

    assert await belongs_to_stream(bus, subjects.INPUTS_STREAM, snapshot(seq, time_ns)) is expected


async def test_snapshot_of_nothing_fits_a_whole_stream() -> None:
    """Position 0 is before the first input."""
    _, bus = await connected(2)

    assert await belongs_to_stream(bus, subjects.INPUTS_STREAM, snapshot(0))
