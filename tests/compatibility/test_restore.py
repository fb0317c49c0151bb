"""A scheduler that finds the snapshot of release 0.1.0, whose state it cannot read, beside a stream of inputs."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from services.scheduler import core
from services.scheduler.fold import Fold
from services.scheduler.outbox import Outbox
from services.scheduler.recording import InputFrame, read_frames
from services.scheduler.restore import restore
from services.scheduler.snapshots import SnapshotStore, decode_snapshot, encode_snapshot
from shared import subjects
from shared.bus.protocol import StreamLimits
from shared.errors import CodecError
from tests.compatibility import golden
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

    with pytest.raises(CodecError, match="snapshot of version 8, not 12"):
        core.decode_state(snapshot.state)


async def test_a_whole_stream_is_folded_anew(broker: MemoryBroker, inputs: list[InputFrame]) -> None:
    """From its first input on, to the state that this release makes of them."""
    bus = broker.connect("this")

    restored = await restore(bus, outbox(bus), check_invariants_every=1)

    expected = Fold(core.new_state())
    for frame in inputs:
        expected.apply(frame.message())
    assert restored is not None
    assert (restored.start, restored.is_lost, restored.fold.position) == (0, False, len(inputs))
    assert core.encode_state(restored.fold.state) == core.encode_state(expected.state)


async def test_a_stream_without_its_beginning_is_not_folded(broker: MemoryBroker, inputs: list[InputFrame]) -> None:
    """Its requests ended long ago; the cell begins anew behind its end, under a higher epoch."""
    broker.drop_oldest(subjects.INPUTS_STREAM, 1)
    bus = broker.connect("this")

    restored = await restore(bus, outbox(bus))

    assert restored is not None
    assert (restored.start, restored.is_lost) == (len(inputs), True)
    assert restored.highest_epoch == decode_snapshot(golden.load("0.1.0").snapshot).epoch
    assert core.encode_state(restored.fold.state) == core.encode_state(core.new_state())
