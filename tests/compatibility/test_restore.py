"""A scheduler that finds the snapshot of release 0.1.0, whose state it cannot read, beside a stream of inputs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from services.scheduler import core
from services.scheduler.fold import Fold
from services.scheduler.leadership import LEAD_RECORD, Progress, Tail, read_tail
from services.scheduler.outbox import Outbox
from services.scheduler.recording import InputFrame, read_frames
from services.scheduler.restore import find_start, fold_tail
from services.scheduler.snapshots import SnapshotStore, decode_snapshot, encode_snapshot
from shared import subjects
from shared.bus.protocol import StreamLimits
from shared.errors import CodecError
from tests.compatibility import golden_sets as golden
from tests.memory_bus import MemoryBroker, MemoryBus

STORED = Path(__file__).parents[1] / "replay" / "recordings" / "disk.tcrec"
BEHIND = 20
"""The input behind which the snapshot was taken."""


@pytest.fixture
def inputs() -> list[InputFrame]:
    """Of a run, from the first one on."""
    return [frame for frame in read_frames(STORED) if isinstance(frame, InputFrame)]


@pytest.fixture
async def broker(inputs: list[InputFrame]) -> MemoryBroker:
    """It holds the inputs, and a snapshot with a state of release 0.1.0."""
    times = iter([frame.time_ns for frame in inputs])
    broker = MemoryBroker(clock=lambda: next(times))
    bus = broker.connect("earlier")
    await bus.ensure_streams(StreamLimits(max_age_s=0))
    for frame in inputs:
        await bus.append(frame.subject, frame.data)
    state = decode_snapshot(golden.load("0.1.0").snapshot)
    taken = msgspec.structs.replace(state, seq=BEHIND, time_ns=inputs[BEHIND - 1].time_ns)
    await SnapshotStore(bus).put(BEHIND, encode_snapshot(taken))
    return broker


def outbox(bus: MemoryBus) -> Outbox:
    """One that says nothing."""
    return Outbox(bus, lambda: 0, lambda: False)


def test_the_earlier_state_is_refused_by_its_version() -> None:
    """The error says which version it has, and which is read."""
    snapshot = decode_snapshot(golden.load("0.1.0").snapshot)

    with pytest.raises(CodecError, match="snapshot of version 8, not 14"):
        core.decode_state(snapshot.state)


EARLIER = Tail("of 0.1.0", 0, published=Progress(BEHIND, 2**62))


@pytest.mark.parametrize("tail", [EARLIER, None], ids=["its lead is there", "its lead is gone"])
@pytest.mark.parametrize("gone", [0, 1])
async def test_what_the_earlier_release_decided_is_not_decided_again(
    broker: MemoryBroker, inputs: list[InputFrame], tail: Tail | None, gone: int
) -> None:
    """Its targets obeyed it. The cell begins anew behind the end, under a higher epoch, though the stream be whole."""
    broker.drop_oldest(subjects.INPUTS_STREAM, gone)

    start = await find_start(broker.connect("this"), release="this", tail=tail)

    assert (start.seq, start.is_lost, start.fold.position) == (len(inputs), True, len(inputs))
    assert start.highest_epoch == start.fold.state.epoch == decode_snapshot(golden.load("0.1.0").snapshot).epoch + 1
    assert (start.fold.state.requests, start.fold.state.workers) == ({}, {})


async def test_without_a_snapshot_the_lead_of_the_earlier_release_counts(
    broker: MemoryBroker, inputs: list[InputFrame]
) -> None:
    """One that was ended while it started has left neither a snapshot nor word of what those before it had said."""
    bus = broker.connect("this")
    await SnapshotStore(bus).delete(BEHIND)
    left = {"holder": "", "scheduler_id": "old", "epoch": 3, "duration_ms": 1000, "release": "of 0.1.0"}
    await bus.write_record(LEAD_RECORD, msgspec.json.encode(left), revision=0)

    start = await find_start(bus, release="this", tail=await read_tail(bus))

    assert (start.seq, start.is_lost, start.fold.state.epoch) == (len(inputs), True, 4)


async def test_what_nobody_said_anything_about_is_folded(broker: MemoryBroker, inputs: list[InputFrame]) -> None:
    """The first scheduler ever, beside a stream that gateways and workers have written to."""
    bus = broker.connect("this")
    await SnapshotStore(bus).delete(BEHIND)

    start = await find_start(bus, release="this", tail=None, check_invariants_every=1)
    await fold_tail(bus, outbox(bus), start)

    expected = Fold(core.new_state())
    for frame in inputs:
        expected.apply(frame.message())
    assert (start.seq, start.is_lost, start.fold.position) == (0, False, len(inputs))
    assert core.encode_state(start.fold.state) == core.encode_state(expected.state)


async def test_a_lead_of_a_stream_that_is_no_more_says_nothing_of_this_one(broker: MemoryBroker) -> None:
    """Streams were made anew and count from 1; the lead outlived them."""
    bus = broker.connect("this")
    await SnapshotStore(bus).delete(BEHIND)

    start = await find_start(bus, release="this", tail=Tail("of old", 0, published=Progress(BEHIND, 1)))

    assert (start.seq, start.is_lost) == (0, False)
