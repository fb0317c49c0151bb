"""Exporting the streams of a cell as a recording."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from services.scheduler import core
from services.scheduler.fold import Fold
from services.scheduler.record import FirstCopies, record
from services.scheduler.replay import replay
from services.scheduler.snapshots import SnapshotStore, encode_snapshot, take_snapshot
from services.scheduler.targets import target_of
from shared import subjects
from shared.bus.protocol import StreamLimits
from shared.codec import Published, encode
from shared.errors import RecordingError
from shared.messages.gateway_notices import GatewayNotice, ResumeNeeded
from shared.messages.status import CellStatus
from tests.memory_bus import MemoryBroker, MemoryBus
from tests.scripted_cell import START_NS, STEP_NS, ScriptedCell, scripted_cell


def notice(number: int, attempt: int = 1) -> GatewayNotice:
    word = ResumeNeeded(request_id="r", attempt=attempt)
    return GatewayNotice(gateway_id="gw", number=number, epoch=1, cause=number, word=word)


async def publish(bus: MemoryBus, outputs: list[Published]) -> None:
    for output in outputs:
        await bus.publish(target_of(output).subject, encode(output))


async def streams_of(cell: ScriptedCell, *, outputs_of: int | None = None) -> tuple[MemoryBroker, MemoryBus]:
    """A broker whose streams hold what that cell's would, with outputs of the first inputs only if asked."""
    times = iter(range(START_NS + STEP_NS, START_NS * 2, STEP_NS))
    broker = MemoryBroker(clock=lambda: next(times))
    bus = broker.connect("test")
    await bus.ensure_streams(StreamLimits(max_age_s=10.0**9))
    for message in cell.messages:
        await bus.append(message.subject, message.data)
    for published in cell.outputs[:outputs_of]:
        await publish(bus, published)
    return broker, bus


def stored_late(outputs: list[Published]) -> list[Published]:
    """As a stream whose broker died has them: every third is missing, and then all come again in order."""
    return [output for place, output in enumerate(outputs) if place % 3 != 1] + outputs


@pytest.fixture(scope="module")
def cell() -> ScriptedCell:
    """One scripted day; tests only read it."""
    return scripted_cell()


async def serve_status(bus: MemoryBus, seq: int) -> None:
    """Answer as a scheduler that has folded up to ``seq``."""
    status = CellStatus(
        scheduler_id="s", epoch=1, seq=seq, model="", page_size=16, queued=0, running=0, max_queued=1, max_context=1
    )

    async def answer(data: bytes) -> bytes:
        return encode(status)

    await bus.serve(subjects.rpc("scheduler", "status"), answer)


async def test_exported_streams_replay(cell: ScriptedCell, tmp_path: Path) -> None:
    """What a cell did is reproduced from its streams alone."""
    _, bus = await streams_of(cell)
    await serve_status(bus, len(cell.messages))
    path = tmp_path / "day.tcrec"

    recorded = await record(bus, path)

    report = replay(path)
    assert (recorded.inputs, recorded.outputs) == (len(cell.messages), sum(map(len, cell.outputs)))
    assert recorded.complete_to_seq == len(cell.messages)
    assert report.difference is None
    assert (report.outputs, report.unrecorded) == (recorded.outputs, 0)


async def test_repeats_of_a_successor_are_recorded_once(cell: ScriptedCell, tmp_path: Path) -> None:
    """A killed scheduler and the next one publish the same; the recording has one copy in the right place."""
    _, bus = await streams_of(cell, outputs_of=50)
    for published in cell.outputs[20:]:
        await publish(bus, published)
    await serve_status(bus, len(cell.messages))
    path = tmp_path / "day.tcrec"

    recorded = await record(bus, path)

    assert recorded.repeats == sum(map(len, cell.outputs[20:50])) > 0
    assert replay(path).difference is None


async def test_two_versions_of_one_number_are_an_error(cell: ScriptedCell, tmp_path: Path) -> None:
    """Two schedulers that disagree leave no recording behind."""
    _, bus = await streams_of(cell)
    other = next(published[0] for published in cell.outputs[30:] if published)
    await publish(bus, [msgspec.structs.replace(other, epoch=7)])
    path = tmp_path / "day.tcrec"

    with pytest.raises(RecordingError, match=f"output {other.number} .* twice with different bytes"):
        await record(bus, path)

    assert not path.exists()


async def test_without_a_scheduler_the_last_outputs_may_be_missing(cell: ScriptedCell, tmp_path: Path) -> None:
    """The recording says up to where it is complete, and replay asks for no more."""
    _, bus = await streams_of(cell, outputs_of=60)
    path = tmp_path / "day.tcrec"

    recorded = await record(bus, path)

    report = replay(path)
    assert recorded.complete_to_seq < 60
    assert report.difference is None
    assert report.inputs == len(cell.messages)
    assert report.unrecorded == sum(map(len, cell.outputs[60:])) > 0


async def test_expired_beginning_is_replaced_by_the_oldest_snapshot(cell: ScriptedCell, tmp_path: Path) -> None:
    """Outputs that were caused before the snapshot are left out."""
    broker, bus = await streams_of(cell)
    await serve_status(bus, len(cell.messages))
    fold = Fold(core.new_state())
    for place, message in enumerate(cell.messages, start=1):
        fold.apply(message)
        if place in (25, 60):
            await SnapshotStore(bus).put(fold.position, encode_snapshot(take_snapshot(fold)))
    broker.drop_oldest(subjects.INPUTS_STREAM, 20)
    path = tmp_path / "day.tcrec"

    recorded = await record(bus, path)

    report = replay(path)
    assert recorded.starts_at_snapshot
    assert recorded.first_seq == 26
    assert recorded.outputs == sum(map(len, cell.outputs[25:]))
    assert report.difference is None
    assert report.unrecorded == 0


async def test_expired_beginning_without_a_snapshot_is_an_error(cell: ScriptedCell, tmp_path: Path) -> None:
    """Such a recording could not be replayed."""
    broker, bus = await streams_of(cell)
    broker.drop_oldest(subjects.INPUTS_STREAM, 1)

    with pytest.raises(RecordingError, match="no snapshot"):
        await record(bus, tmp_path / "day.tcrec")


async def test_outputs_that_were_stored_late_take_their_place(cell: ScriptedCell, tmp_path: Path) -> None:
    """The recording is as good as one of outputs that were stored in order."""
    _, bus = await streams_of(cell, outputs_of=0)
    every = [output for published in cell.outputs for output in published]
    for start in range(0, len(every), 50):
        await publish(bus, stored_late(every[start : start + 50]))
    await serve_status(bus, len(cell.messages))
    path = tmp_path / "day.tcrec"

    recorded = await record(bus, path)

    report = replay(path)
    assert recorded.outputs == len(every)
    assert (report.difference, report.unrecorded) == (None, 0)


async def test_expired_outputs_are_not_asked_for(cell: ScriptedCell, tmp_path: Path) -> None:
    """The outputs stream is larger than the inputs stream and forgets sooner."""
    broker, bus = await streams_of(cell)
    await serve_status(bus, len(cell.messages))
    broker.drop_oldest(subjects.OUTPUTS_STREAM, 10)
    path = tmp_path / "day.tcrec"

    recorded = await record(bus, path)

    report = replay(path)
    assert report.difference is None
    assert recorded.outputs < sum(map(len, cell.outputs))
    assert report.unrecorded == sum(map(len, cell.outputs)) - recorded.outputs


async def test_empty_cell_is_an_error(tmp_path: Path) -> None:
    """There is nothing to record."""
    bus = MemoryBroker().connect("test")
    await bus.ensure_streams(StreamLimits())

    with pytest.raises(RecordingError, match="no inputs"):
        await record(bus, tmp_path / "day.tcrec")


def test_numbers_must_not_be_missing() -> None:
    """A hole in one target's numbers means that outputs were lost."""
    copies = FirstCopies()
    copies.is_first(notice(5), encode(notice(5)))

    with pytest.raises(RecordingError, match=r"output 7 .* follows output 5"):
        copies.is_first(notice(7), encode(notice(7)))
