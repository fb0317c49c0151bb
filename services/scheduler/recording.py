"""Recordings: a file with the inputs of a cell and the outputs that they led to.

Layout. The magic bytes, then frames: payload length (u32), CRC-32 of kind and payload (u32), kind (u8), payload;
integers are little-endian. The frames in order: one header, at most one snapshot, then inputs, each followed by the
outputs that it caused, and one end frame with the counts. A file without its end frame is truncated. The reader holds
one frame at a time, the writer up to a mebibyte of them; it works on a temporary file and renames it when it is whole.
"""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, TypeVar

import msgspec

from shared.bus.protocol import StreamMessage
from shared.errors import RecordingError, reason_of
from shared.result_file import ResultFile
from shared.undecodable import UNDECODABLE

MAGIC = b"TCREC\r\n\x1a"
VERSION = 1
LARGEST_FRAME_BYTES = 1024**3

_PIECE_BYTES = 2**20

_FRAME = struct.Struct("<IIB")
_HEADER, _SNAPSHOT, _INPUT, _OUTPUT, _END = 1, 2, 3, 4, 5
_KINDS = {_HEADER: "header", _SNAPSHOT: "snapshot", _INPUT: "input", _OUTPUT: "output", _END: "end"}


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """Where the recording begins, and for which inputs it has all outputs.

    Outputs caused by inputs before ``outputs_from_seq`` were not stored any more when this was recorded; those
    caused by inputs behind ``complete_to_seq`` may still have been in flight.
    """

    version: int = VERSION
    first_seq: int = 1
    outputs_from_seq: int = 0
    complete_to_seq: int = 2**63 - 1
    release: str = ""  # Of the fold that made the outputs, see fold_release; "" where that is not known.
    policies: tuple[str, ...] = ()  # From outside that this fold's settings named, see ``outside.of_config``.


class End(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of frames, so that a file which lacks some is noticed."""

    inputs: int
    outputs: int


class InputFrame(msgspec.Struct, frozen=True, array_like=True):
    """An input as the stream stored it."""

    seq: int
    time_ns: int
    subject: str
    data: bytes

    def message(self) -> StreamMessage:
        """Return the input as the message of the stream that it was, with sequence, stamp and subject."""
        return StreamMessage(self.seq, self.time_ns, self.subject, self.data)


class OutputFrame(msgspec.Struct, frozen=True, array_like=True):
    """An output as it was published."""

    data: bytes


class SnapshotFrame(msgspec.Struct, frozen=True, array_like=True):
    """The snapshot (``snapshots.encode_snapshot``) that the first input continues."""

    data: bytes


T = TypeVar("T", Header, SnapshotFrame, InputFrame, OutputFrame, End)

Frame = Header | SnapshotFrame | InputFrame | OutputFrame | End


class RecordingFrames:
    """Encodes a recording frame by frame, and counts what the end frame says."""

    def __init__(self) -> None:
        """Begin with no frames counted."""
        self._inputs = 0
        self._outputs = 0

    def begin(self, header: Header) -> bytes:
        """Return the magic bytes and the header's frame, which come before everything else."""
        return MAGIC + _frame(_HEADER, msgspec.msgpack.encode(header))

    def snapshot(self, data: bytes) -> bytes:
        """Return a snapshot's frame, for before the first input. Raises RecordingError for more than 1 GiB."""
        return _frame(_SNAPSHOT, msgspec.msgpack.encode(SnapshotFrame(data)))

    def input(self, message: StreamMessage) -> bytes:
        """Return the frame of an input, and count it."""
        frame = InputFrame(message.seq, message.time_ns, message.subject, message.data)
        self._inputs += 1
        return _frame(_INPUT, msgspec.msgpack.encode(frame))

    def output(self, data: bytes) -> bytes:
        """Return the frame of an output, for behind the input that caused it, and count it."""
        self._outputs += 1
        return _frame(_OUTPUT, msgspec.msgpack.encode(OutputFrame(data)))

    def end(self) -> bytes:
        """Return the frame that ends the file, with the counts of inputs and outputs so far."""
        return _frame(_END, msgspec.msgpack.encode(End(inputs=self._inputs, outputs=self._outputs)))


def _frame(kind: int, payload: bytes) -> bytes:
    if len(payload) > LARGEST_FRAME_BYTES:
        raise RecordingError(f"a frame of {len(payload)} bytes is too large")
    checksum = zlib.crc32(payload, zlib.crc32(bytes([kind])))
    return _FRAME.pack(len(payload), checksum, kind) + payload


class RecordingWriter:
    """Writes ``path`` when its ``async with`` block ends without an exception, and nothing otherwise.

    Files are written in threads: a slow disk holds up the recording, not the task that reads from the broker.
    """

    def __init__(self, path: Path, header: Header) -> None:
        """Take the place of the file, which entering the block opens."""
        self._path = path
        self._header = header
        self._frames = RecordingFrames()
        self._gathered = bytearray()
        self._result: ResultFile | None = None

    async def __aenter__(self) -> RecordingWriter:
        """Open the file. Raises RecordingError where it cannot be written."""
        try:
            self._result = await asyncio.to_thread(ResultFile, self._path)
        except OSError as error:
            raise RecordingError(f"cannot write {self._path}: {reason_of(error)}") from error
        await self._write(self._frames.begin(self._header))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Complete the file and rename it to its path; after an exception, remove it.

        Raises RecordingError where the file cannot be completed.
        """
        assert self._result is not None
        try:
            if kind is None:
                await self._write(self._frames.end())
                await self._flush()
                await asyncio.to_thread(self._result.keep)
        except OSError as failure:
            raise RecordingError(f"cannot write {self._path}: {reason_of(failure)}") from failure
        finally:
            await asyncio.to_thread(self._result.drop)

    async def write_snapshot(self, data: bytes) -> None:
        """Write the snapshot, before the first input. Raises RecordingError where the file cannot be written."""
        await self._write(self._frames.snapshot(data))

    async def write_input(self, message: StreamMessage) -> None:
        """Write an input. Sequences must be consecutive, which replay checks, not the writer."""
        await self._write(self._frames.input(message))

    async def write_output(self, data: bytes) -> None:
        """Write an output, behind the input that caused it."""
        await self._write(self._frames.output(data))

    async def _write(self, frame: bytes) -> None:
        """Gather frames until a mebibyte is there, then write them in one turn of a thread."""
        self._gathered += frame
        if len(self._gathered) >= _PIECE_BYTES:
            await self._flush()

    async def _flush(self) -> None:
        assert self._result is not None
        gathered, self._gathered = self._gathered, bytearray()
        try:
            await asyncio.to_thread(self._result.file.write, gathered)
        except OSError as error:
            raise RecordingError(f"cannot write {self._path}: {reason_of(error)}") from error


def read_frames(path: Path) -> Iterator[Frame]:
    """Yield every frame in order, the header first and the end frame last.

    Raises RecordingError, naming the frame, when the file is no recording, damaged or truncated.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise RecordingError(f"cannot read {path}: {error.strerror}") from error
    with file:
        if file.read(len(MAGIC)) != MAGIC:
            raise RecordingError(f"{path} is not a recording")
        yield from _Reader(file, path).frames()


class _Reader:
    """Checks frames and their order while it reads them."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path
        self._number = 0
        self._place = ""
        self._inputs = 0
        self._outputs = 0

    def frames(self) -> Iterator[Frame]:
        kind, payload = self._next()
        if kind != _HEADER:
            raise self._wrong("is not the header")
        header = self._decode(payload, Header)
        if header.version != VERSION:
            raise self._wrong(f"has version {header.version}; this release reads version {VERSION}")
        yield header
        while True:
            kind, payload = self._next()
            if kind == _END:
                yield self._end(payload)
                return
            yield self._body(kind, payload)

    def _body(self, kind: int, payload: bytes) -> Frame:
        if kind == _INPUT:
            message = self._decode(payload, InputFrame)
            self._inputs += 1
            self._place = f", behind input {message.seq}"
            return message
        if kind == _OUTPUT and self._inputs:
            self._outputs += 1
            return self._decode(payload, OutputFrame)
        if kind == _SNAPSHOT and self._number == 2:
            return self._decode(payload, SnapshotFrame)
        raise self._wrong(f"({_KINDS.get(kind, f'kind {kind}')}) is out of place")

    def _end(self, payload: bytes) -> End:
        end = self._decode(payload, End)
        if (end.inputs, end.outputs) != (self._inputs, self._outputs):
            raise self._wrong(
                f"counts {end.inputs} inputs and {end.outputs} outputs, the file has {self._inputs} and {self._outputs}"
            )
        if self._file.read(1):
            raise self._wrong("is the end, but the file goes on")
        return end

    def _next(self) -> tuple[int, bytes]:
        self._number += 1
        head = self._file.read(_FRAME.size)
        if len(head) < _FRAME.size:
            raise self._wrong("is missing or cut off: the recording is truncated")
        length, checksum, kind = _FRAME.unpack(head)
        if length > LARGEST_FRAME_BYTES:
            raise self._wrong(f"claims {length} bytes: the recording is damaged")
        payload = self._read(length)
        if len(payload) < length:
            raise self._wrong("is cut off: the recording is truncated")
        if zlib.crc32(payload, zlib.crc32(bytes([kind]))) != checksum:
            raise self._wrong("fails its checksum: the recording is damaged")
        return kind, payload

    def _read(self, length: int) -> bytes:
        """Return up to ``length`` bytes, read in pieces: a damaged length must not allocate more than the file has."""
        pieces = []
        while length:
            piece = self._file.read(min(length, _PIECE_BYTES))
            if not piece:
                break
            pieces.append(piece)
            length -= len(piece)
        return b"".join(pieces)

    def _decode(self, payload: bytes, kind: type[T]) -> T:
        try:
            return msgspec.msgpack.decode(payload, type=kind)
        except UNDECODABLE as error:
            raise self._wrong(f"cannot be decoded: {error}") from error

    def _wrong(self, what: str) -> RecordingError:
        return RecordingError(f"{self._path}: frame {self._number}{self._place} {what}")
