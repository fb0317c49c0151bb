"""The recording's file format: whole, or an error that names the frame."""

from __future__ import annotations

import asyncio
import os
import random
import struct
import threading
from pathlib import Path

import pytest

from services.scheduler.recording import (
    End,
    Header,
    InputFrame,
    OutputFrame,
    RecordingWriter,
    SnapshotFrame,
    read_frames,
)
from shared.bus.protocol import StreamMessage
from shared.errors import RecordingError

HEADER = Header(first_seq=8, outputs_from_seq=9, complete_to_seq=10)


def write(path: Path, inputs: int = 3) -> None:
    """A header, a snapshot, and inputs with two outputs each."""
    asyncio.run(_write(path, inputs))


async def _write(path: Path, inputs: int) -> None:
    async with RecordingWriter(path, HEADER) as writer:
        await writer.write_snapshot(b"state")
        for number in range(inputs):
            await writer.write_input(StreamMessage(8 + number, 1000 + number, "tc.in.cell", b"input %d" % number))
            await writer.write_output(b"first")
            await writer.write_output(b"second")


def frame_starts(data: bytes) -> list[int]:
    """Where each frame begins, and the end of the last."""
    starts, offset = [], 8
    while offset < len(data):
        starts.append(offset)
        offset += 9 + struct.unpack_from("<I", data, offset)[0]
    return [*starts, offset]


def test_frames_come_back_as_they_were_written(tmp_path: Path) -> None:
    """Writing and reading is the identity."""
    path = tmp_path / "a.tcrec"

    write(path, inputs=1)

    assert list(read_frames(path)) == [
        HEADER,
        SnapshotFrame(b"state"),
        InputFrame(8, 1000, "tc.in.cell", b"input 0"),
        OutputFrame(b"first"),
        OutputFrame(b"second"),
        End(inputs=1, outputs=2),
    ]


def test_failed_write_leaves_nothing_and_keeps_what_was_there(tmp_path: Path) -> None:
    """Neither a half-written recording nor a temporary file remains."""
    path = tmp_path / "a.tcrec"
    write(path)
    before = path.read_bytes()

    async def fail_half_way() -> None:
        async with RecordingWriter(path, HEADER) as writer:
            await writer.write_input(StreamMessage(1, 1, "tc.in.cell", b"\0" * 2**21))  # More than is gathered.
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(fail_half_way())

    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


async def test_a_file_that_cannot_take_its_name_is_a_recording_error(tmp_path: Path) -> None:
    """A folder is in its place by the time it is complete; nothing is left beside that."""
    path = tmp_path / "recording"

    async def write_beside_a_folder() -> None:
        async with RecordingWriter(path, HEADER) as writer:
            await writer.write_snapshot(b"state")
            (path / "in the way").mkdir(parents=True)

    with pytest.raises(RecordingError, match="cannot write"):
        await write_beside_a_folder()

    assert [each.name for each in tmp_path.iterdir()] == ["recording"]


async def test_a_file_that_hangs_holds_nobody_else(tmp_path: Path) -> None:
    """Other tasks of the loop run while the file system keeps the recording waiting."""
    path = tmp_path / "a.tcrec"
    os.mkfifo(path)  # Its opening waits for a reader.
    writer = RecordingWriter(path, HEADER)
    opening = asyncio.create_task(writer.__aenter__())

    for _ in range(10):
        await asyncio.sleep(0)
    is_waiting = not opening.done()
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    await opening

    assert is_waiting
    await writer.__aexit__(ValueError, ValueError(), None)
    os.close(reader)
    assert list(tmp_path.iterdir()) == [path]


def test_a_pipe_gets_the_recording_and_stays_a_pipe(tmp_path: Path) -> None:
    """It is no file that could be replaced; a link to a recording stays, too."""
    pipe, link, copy = tmp_path / "pipe", tmp_path / "link", tmp_path / "copy"
    os.mkfifo(pipe)
    link.symlink_to("copy")
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write(pipe)
    reader.join()
    write(link)

    assert pipe.is_fifo()
    assert link.is_symlink()
    assert read == [copy.read_bytes()]


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    """Cut off anywhere, also between two frames, the file is refused."""
    path = tmp_path / "a.tcrec"
    write(path)
    data = path.read_bytes()
    cut = tmp_path / "cut.tcrec"

    for length in range(len(data)):
        cut.write_bytes(data[:length])
        with pytest.raises(RecordingError, match=r"truncated|not a recording"):
            list(read_frames(cut))


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    """No single change of the file goes through."""
    path = tmp_path / "a.tcrec"
    write(path)
    data = path.read_bytes()
    chance = random.Random(1)
    changed = tmp_path / "changed.tcrec"

    for offset in range(len(data)):
        flipped = bytearray(data)
        flipped[offset] ^= 1 << chance.randrange(8)
        changed.write_bytes(flipped)
        with pytest.raises(RecordingError):
            list(read_frames(changed))


def test_damage_is_named_by_frame_and_input(tmp_path: Path) -> None:
    """The message leads to the place."""
    path = tmp_path / "a.tcrec"
    write(path)
    data = bytearray(path.read_bytes())
    data[frame_starts(bytes(data))[6] + 9] ^= 1
    path.write_bytes(data)

    with pytest.raises(RecordingError, match="frame 7, behind input 9 fails its checksum"):
        list(read_frames(path))


@pytest.mark.parametrize("removed", [0, *range(2, 12)])
def test_missing_frame_is_noticed(tmp_path: Path, removed: int) -> None:
    """A frame cut out whole leaves checksums right and the counts, or the order, wrong."""
    path = tmp_path / "a.tcrec"
    write(path)
    data = path.read_bytes()
    starts = frame_starts(data)
    path.write_bytes(data[: starts[removed]] + data[starts[removed + 1] :])

    with pytest.raises(RecordingError):
        list(read_frames(path))


@pytest.mark.parametrize("content", [b"", b"something else entirely", b"TCREC"])
def test_other_files_are_no_recordings(tmp_path: Path, content: bytes) -> None:
    """The magic tells."""
    path = tmp_path / "other"
    path.write_bytes(content)

    with pytest.raises(RecordingError, match="not a recording"):
        list(read_frames(path))


def test_missing_file_is_a_recording_error(tmp_path: Path) -> None:
    """The operator learns which file."""
    with pytest.raises(RecordingError, match=r"cannot read .*nothing\.tcrec"):
        list(read_frames(tmp_path / "nothing.tcrec"))
