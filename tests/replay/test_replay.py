"""Replaying a recording: equal to the byte, or the first difference; damage is never a difference."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from services.scheduler import core
from services.scheduler.fold import Fold
from services.scheduler.recording import Header
from services.scheduler.replay import EXIT_BAD_FILE, EXIT_DIFFERS, EXIT_EQUAL, main, replay
from services.scheduler.snapshots import encode_snapshot, take_snapshot
from shared.codec import decode_input, encode
from shared.errors import RecordingError
from shared.messages.requests import SubmitRequest
from tests.recording_files import writing
from tests.scripted_cell import ScriptedCell, scripted_cell, with_changed_token, write_recording


@pytest.fixture(scope="module")
def cell() -> ScriptedCell:
    """One scripted day; tests only read it."""
    return scripted_cell()


@pytest.fixture
def recording(cell: ScriptedCell, tmp_path: Path) -> Path:
    """That day, recorded."""
    path = tmp_path / "day.tcrec"
    write_recording(cell, path)
    return path


def submits(cell: ScriptedCell) -> dict[int, SubmitRequest]:
    """Requests by sequence."""
    found = {}
    for message in cell.messages[:-1]:
        if message.data[:1] != b"\xc1" and isinstance(decoded := decode_input(message.data), SubmitRequest):
            found[message.seq] = decoded
    return found


def write_partly(
    cell: ScriptedCell, path: Path, header: Header, *, first: int = 1, outputs_of: set[int], snapshot: bytes = b""
) -> None:
    """Inputs from ``first`` on, with the outputs of some of them only."""
    with writing(path, header) as writer:
        if snapshot:
            writer.write_snapshot(snapshot)
        for message, published in zip(cell.messages, cell.outputs, strict=True):
            if message.seq >= first:
                writer.write_input(message)
                for output in published if message.seq in outputs_of else ():
                    writer.write_output(encode(output))


def test_recording_replays_to_the_byte(cell: ScriptedCell, recording: Path) -> None:
    """Every output is the same, skipped messages are skipped again, and the counters come out alike."""
    report = replay(recording)

    assert report.difference is None
    assert report.inputs == len(cell.messages)
    assert report.outputs == sum(len(published) for published in cell.outputs) > 0
    assert report.skipped == 1
    assert report.unrecorded == 0
    assert report.counters == cell.fold.state.counters


def test_recording_is_the_same_file_every_time(cell: ScriptedCell, recording: Path, tmp_path: Path) -> None:
    """It holds nothing of when and where it was made."""
    again = tmp_path / "again.tcrec"
    write_recording(cell, again)

    assert again.read_bytes() == recording.read_bytes()


def test_one_changed_token_of_one_input_is_found(cell: ScriptedCell, tmp_path: Path) -> None:
    """With a right checksum it is a difference, at that input, in the plan that carries the token."""
    seq, original = list(submits(cell).items())[5]
    path = tmp_path / "tampered.tcrec"
    write_recording(cell, path, replaced={seq: with_changed_token(original)})

    report = replay(path)

    assert report.difference is not None
    assert report.difference.seq == seq
    assert report.difference.target == "tc.out.worker.w1 (one)"
    assert original.request_id in report.difference.expected
    assert original.request_id in report.difference.got
    assert report.difference.expected != report.difference.got


def test_one_changed_output_is_found(cell: ScriptedCell, tmp_path: Path) -> None:
    """The recorded side may be wrong as well."""
    path = tmp_path / "tampered.tcrec"
    victim = next(seq for seq, published in enumerate(cell.outputs) if published and seq > 40)
    with writing(path, Header(complete_to_seq=len(cell.messages))) as writer:
        for place, (message, published) in enumerate(zip(cell.messages, cell.outputs, strict=True)):
            writer.write_input(message)
            for output in published:
                changed = msgspec.structs.replace(output, epoch=99) if place == victim else output
                writer.write_output(encode(changed))

    report = replay(path)

    assert report.difference is not None
    assert report.difference.seq == victim + 1
    assert "epoch=99" in report.difference.expected


def test_missing_and_additional_outputs_are_differences(cell: ScriptedCell, tmp_path: Path) -> None:
    """An output that only one side has is found where it belongs."""
    everything = {message.seq for message in cell.messages}
    with_outputs = [place + 1 for place, published in enumerate(cell.outputs) if published]
    missing, additional = tmp_path / "missing.tcrec", tmp_path / "additional.tcrec"
    header = Header(complete_to_seq=len(cell.messages))
    write_partly(cell, missing, header, outputs_of=everything - {with_outputs[3]})
    with writing(additional, header) as writer:
        for message, published in zip(cell.messages, cell.outputs, strict=True):
            writer.write_input(message)
            for output in published:
                writer.write_output(encode(output))
            if message.seq == with_outputs[3]:
                writer.write_output(encode(published[-1]))

    without, doubled = replay(missing).difference, replay(additional).difference

    assert without is not None
    assert (without.seq, without.expected) == (with_outputs[3], "")
    assert doubled is not None
    assert (doubled.seq, doubled.got) == (with_outputs[3], "")


def test_outputs_that_were_on_their_way_may_be_missing(cell: ScriptedCell, tmp_path: Path) -> None:
    """Behind the input up to which the recording says it is complete, nothing has to be there."""
    path = tmp_path / "open.tcrec"
    complete = len(cell.messages) - 10
    write_partly(cell, path, Header(complete_to_seq=complete), outputs_of=set(range(1, complete + 1)))

    report = replay(path)

    assert report.difference is None
    assert report.unrecorded == sum(len(published) for published in cell.outputs[complete:]) > 0


def test_outputs_that_had_expired_are_not_compared(cell: ScriptedCell, tmp_path: Path) -> None:
    """The outputs stream may begin later than the inputs stream."""
    path = tmp_path / "late.tcrec"
    header = Header(outputs_from_seq=30, complete_to_seq=len(cell.messages))
    write_partly(cell, path, header, outputs_of=set(range(30, len(cell.messages) + 1)))

    report = replay(path)

    assert report.difference is None
    assert report.unrecorded == sum(len(published) for published in cell.outputs[:29]) > 0


def test_recording_that_starts_at_a_snapshot_replays(cell: ScriptedCell, tmp_path: Path) -> None:
    """The state of the snapshot stands in for the inputs before it."""
    path = tmp_path / "later.tcrec"
    fold = Fold(core.new_state())
    for message in cell.messages[:40]:
        fold.apply(message)
    header = Header(first_seq=41, complete_to_seq=len(cell.messages))
    everything = set(range(1, len(cell.messages) + 1))
    write_partly(cell, path, header, first=41, outputs_of=everything, snapshot=encode_snapshot(take_snapshot(fold)))

    report = replay(path)

    assert report.difference is None
    assert (report.first_seq, report.inputs) == (41, len(cell.messages) - 40)
    assert report.outputs == sum(len(published) for published in cell.outputs[40:]) > 0


@pytest.mark.parametrize("snapshot_at", [0, 39])
def test_recording_must_continue_its_snapshot(cell: ScriptedCell, tmp_path: Path, snapshot_at: int) -> None:
    """A missing or other beginning is an error of the file, not a difference."""
    path = tmp_path / "later.tcrec"
    fold = Fold(core.new_state())
    for message in cell.messages[:snapshot_at]:
        fold.apply(message)
    snapshot = encode_snapshot(take_snapshot(fold)) if snapshot_at else b""
    write_partly(cell, path, Header(first_seq=41), first=41, outputs_of=set(), snapshot=snapshot)

    with pytest.raises(RecordingError, match="snapshot"):
        replay(path)


def test_missing_input_is_an_error(cell: ScriptedCell, tmp_path: Path) -> None:
    """A hole in the sequence is damage, whatever the counts say."""
    path = tmp_path / "hole.tcrec"
    with writing(path, Header(complete_to_seq=0)) as writer:
        for message in [*cell.messages[:5], *cell.messages[6:9]]:
            writer.write_input(message)

    with pytest.raises(RecordingError, match="input 7 follows input 5"):
        replay(path)


def test_damage_behind_a_difference_is_reported_as_damage(cell: ScriptedCell, tmp_path: Path) -> None:
    """A truncated file is never said to differ."""
    seq, original = list(submits(cell).items())[5]
    path = tmp_path / "tampered.tcrec"
    write_recording(cell, path, replaced={seq: with_changed_token(original)})
    path.write_bytes(path.read_bytes()[:-3])

    with pytest.raises(RecordingError, match="truncated"):
        replay(path)


def test_command_says_equal_differs_and_bad_file(
    cell: ScriptedCell, recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit codes 0, 1 and 2, each with words that say why."""
    seq, original = list(submits(cell).items())[5]
    tampered, torn = tmp_path / "tampered.tcrec", tmp_path / "torn.tcrec"
    write_recording(cell, tampered, replaced={seq: with_changed_token(original)})
    torn.write_bytes(recording.read_bytes()[:-20])

    equal, equal_words = main([str(recording)]), capsys.readouterr()
    differs, differs_words = main([str(tampered)]), capsys.readouterr()
    bad, bad_words = main([str(torn)]), capsys.readouterr()

    assert (equal, differs, bad) == (EXIT_EQUAL, EXIT_DIFFERS, EXIT_BAD_FILE)
    assert "no difference" in equal_words.out
    assert f"input {seq}: output" in differs_words.out
    # The field, both values and the input that led there.
    assert "output.order.tokens: recorded" in differs_words.out
    assert "while folding: SubmitRequest" in differs_words.out
    assert "truncated" in bad_words.err


def test_command_prints_json(
    cell: ScriptedCell, recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One object on standard output, also for a bad file."""
    main([str(recording), "--json"])
    equal = json.loads(capsys.readouterr().out)
    main([str(tmp_path / "nothing"), "--json"])
    failed = json.loads(capsys.readouterr().out)

    assert equal["equal"] is True
    assert equal["inputs"] == len(cell.messages)
    assert failed["error"]["code"] == "recording_error"
