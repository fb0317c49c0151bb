"""Recordings for tests, written by the frames of the real writer, at once and without a loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.scheduler.recording import Header, RecordingFrames
from shared.bus.protocol import StreamMessage


class Frames:
    """What is written when the block ends."""

    def __init__(self, header: Header) -> None:
        self._frames = RecordingFrames()
        self.data = bytearray(self._frames.begin(header))

    def write_snapshot(self, data: bytes) -> None:
        self.data += self._frames.snapshot(data)

    def write_input(self, message: StreamMessage) -> None:
        self.data += self._frames.input(message)

    def write_output(self, data: bytes) -> None:
        self.data += self._frames.output(data)

    def end(self) -> None:
        self.data += self._frames.end()


@contextmanager
def writing(path: Path, header: Header) -> Iterator[Frames]:
    """Write a recording of what the block has said, unless it raises."""
    frames = Frames(header)
    yield frames
    frames.end()
    path.write_bytes(frames.data)
