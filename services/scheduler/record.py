"""``thermocline record --out FILE``: export the cell's inputs and their outputs as a recording.

Inputs up to now are written; each is followed by the outputs it caused. An output that a scheduler published and its
successor published again is written once, and different bytes under one number are an error.
"""

from __future__ import annotations

import asyncio
import heapq
import sys
from array import array
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import xxhash

from services.scheduler.fold import load_state
from services.scheduler.leadership import read_tail
from services.scheduler.quarantine import read_skips
from services.scheduler.recording import Header, RecordingWriter
from services.scheduler.snapshots import Snapshot, SnapshotStore, belongs_to_stream, encode_snapshot
from services.scheduler.targets import Target, target_of
from shared import subjects
from shared.arguments import ArgumentParser
from shared.broker import BrokerSettings, add_broker_flags, broker_of
from shared.bus.nats_bus import connect_with
from shared.bus.protocol import Bus
from shared.codec import Published, decode, decode_published, encode
from shared.errors import CodecError, OperatorError, RecordingError, ThermoclineError, Unavailable
from shared.guard import guarded
from shared.messages.status import CellStatus, GetStatus
from shared.progress_line import Bar, shown
from shared.result_file import check_writable

EXIT_OK, EXIT_FAILED, EXIT_BAD_ARGUMENTS = 0, 1, 2

CONNECT_S = 5.0

PATIENCE_S = 10.0
"""How long to wait for a scheduler to publish the outputs of the last input."""


SAID_EVERY = 256
"""Inputs between two updates of the progress."""


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """What was written: the range of inputs, and counts."""

    first_seq: int
    last_seq: int
    inputs: int
    outputs: int
    repeats: int  # Outputs that were published more than once, with equal bytes.
    starts_at_snapshot: bool
    complete_to_seq: int


MOST_LATE = 8192
"""Most outputs between an output's place in order and its place in the stream: more than a scheduler sends again."""


class FirstCopies:
    """Finder of the first copy of every output. Holds 8 bytes for each output."""

    def __init__(self) -> None:
        """Begin with no outputs seen."""
        self.repeats = 0
        self._digests: dict[Target, tuple[int, array[int]]] = {}  # (first number, a digest for each from there)

    def is_first(self, output: Published, data: bytes) -> bool:
        """Return whether the copy is the first.

        Raises RecordingError when an earlier copy had other bytes, or when numbers are missing before it.
        """
        target, digest = target_of(output), xxhash.xxh3_64_intdigest(data)
        first, digests = self._digests.setdefault(target, (output.number, array("Q")))
        place = output.number - first
        if place == len(digests):
            digests.append(digest)
            return True
        if not 0 <= place < len(digests):
            raise RecordingError(f"output {output.number} to {target} follows output {first + len(digests) - 1}")
        if digests[place] != digest:
            raise RecordingError(f"output {output.number} to {target} was published twice with different bytes")
        self.repeats += 1
        return False


async def record(bus: Bus, path: Path, bar: Bar | None = None) -> Recorded:
    """Write the streams to ``path``. Raises RecordingError when they hold no recording, and Unavailable."""
    info = await bus.stream_info(subjects.INPUTS_STREAM)
    if info.last_seq < info.first_seq:
        raise RecordingError("the cell has no inputs yet")
    tail = await read_tail(bus)
    folded_from = tail.folded_from if tail is not None else 0
    snapshot = None if info.first_seq == 1 and not folded_from else await _oldest_snapshot(bus, folded_from)
    first_seq = 1 if snapshot is None else snapshot.seq + 1
    complete_to_seq = await _complete_to(bus, info.last_seq)
    outputs_from_seq = await _outputs_from(bus)
    header = Header(
        first_seq=first_seq,
        outputs_from_seq=outputs_from_seq,
        complete_to_seq=complete_to_seq,
        release=tail.release if tail is not None else "",
        policies=tail.policies if tail is not None else (),
    )
    copies = FirstCopies()
    inputs = outputs = 0
    pending = _outputs(bus, copies, max(first_seq, outputs_from_seq), info.last_seq)
    output = await anext(pending, None)
    async with RecordingWriter(path, header) as writer:
        if snapshot is not None:
            await writer.write_snapshot(encode_snapshot(snapshot))
        async for message in bus.follow(subjects.INPUTS_STREAM, from_seq=first_seq, live=False):
            if message.seq > info.last_seq:
                break
            if message.seq != first_seq + inputs:
                raise RecordingError(f"input {first_seq + inputs} expired while it was being recorded; record again")
            await writer.write_input(message)
            inputs += 1
            if bar is not None and inputs % SAID_EVERY == 0:
                bar.say(f"{inputs:,} of {info.last_seq - first_seq + 1:,} inputs")
            while output is not None and output[0] <= message.seq:
                await writer.write_output(output[1])
                outputs += 1
                output = await anext(pending, None)
    return Recorded(
        first_seq=first_seq,
        last_seq=info.last_seq,
        inputs=inputs,
        outputs=outputs,
        repeats=copies.repeats,
        starts_at_snapshot=snapshot is not None,
        complete_to_seq=complete_to_seq,
    )


async def _oldest_snapshot(bus: Bus, folded_from: int) -> Snapshot:
    """Return the snapshot to begin at when the first inputs have expired, or another release folded them."""
    async for snapshot in SnapshotStore(bus).oldest_first():
        if snapshot.seq >= folded_from and await belongs_to_stream(bus, subjects.INPUTS_STREAM, snapshot):
            skips = await read_skips(bus, snapshot.seq + 1)
            if not skips.decided or skips.suit(load_state(snapshot.state), snapshot.seq):
                return snapshot
    raise RecordingError(
        "the first inputs have expired, or another release folded them, and no snapshot stands in for them"
    )


async def _complete_to(bus: Bus, last_seq: int) -> int:
    """Return the input up to which all outputs are stored; waits for a live scheduler to fold the last one."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE_S
    try:
        while loop.time() < deadline:
            answer = await bus.call(subjects.rpc("scheduler", "status"), encode(GetStatus()))
            # The scheduler answers behind its outputs, over the same connection.
            if decode(answer, CellStatus).seq >= last_seq:
                return last_seq
            await asyncio.sleep(0.05)
    except Unavailable:
        pass  # No scheduler is running; the last one may have died in the middle of its outputs.
    info = await bus.stream_info(subjects.OUTPUTS_STREAM)
    async for message in bus.follow(subjects.OUTPUTS_STREAM, from_seq=info.last_seq, live=False):
        return _decoded(message.seq, message.data).cause - 1
    return 0


async def _outputs_from(bus: Bus) -> int:
    """Return the first input whose outputs are all stored; 0 when none has expired."""
    info = await bus.stream_info(subjects.OUTPUTS_STREAM)
    if info.first_seq == 1:
        return 0
    async for message in bus.follow(subjects.OUTPUTS_STREAM, live=False):
        return _decoded(message.seq, message.data).cause + 1
    return info.last_seq + 1


async def _outputs(bus: Bus, copies: FirstCopies, from_seq: int, to_seq: int) -> AsyncIterator[tuple[int, bytes]]:
    """Yield (cause, bytes) of every output of these inputs once, by cause and, for each target, by number.

    When a broker of a cluster dies, outputs that it had not stored are published again, behind later ones.
    """
    late: list[tuple[int, str, int, int, Published, bytes]] = []
    async for message in bus.follow(subjects.OUTPUTS_STREAM, live=False):
        output = _decoded(message.seq, message.data)
        if from_seq <= output.cause <= to_seq:
            place = (output.cause, str(target_of(output)), output.number, message.seq)
            heapq.heappush(late, (*place, output, message.data))
        if len(late) > MOST_LATE:
            *_, first, data = heapq.heappop(late)
            if copies.is_first(first, data):
                yield first.cause, data
    while late:
        *_, first, data = heapq.heappop(late)
        if copies.is_first(first, data):
            yield first.cause, data


def _decoded(seq: int, data: bytes) -> Published:
    try:
        return decode_published(data)
    except CodecError as error:
        raise RecordingError(f"message {seq} of {subjects.OUTPUTS_STREAM} is no output: {error.message}") from error


async def _record_from(broker: BrokerSettings, path: Path) -> Recorded:
    with shown("connecting to the broker") as bar:
        bus = await connect_with(broker, "record", timeout_s=CONNECT_S)
        try:
            return await record(bus, path, bar)
        finally:
            await bus.close()


def parser() -> ArgumentParser:
    """Return the command line."""
    made = ArgumentParser(prog="thermocline record", description="Export the inputs and outputs of a running cell.")
    made.add_argument("--out", metavar="FILE", type=Path, required=True, help="file of the recording")
    add_broker_flags(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0: written; 1: the cell cannot be recorded; 2: bad arguments, or broker refuses."""
    parsed = parser().parse_args(argv)
    try:
        check_writable(parsed.out)
        recorded = asyncio.run(_record_from(broker_of(parsed), parsed.out))
    except ThermoclineError as error:
        print(f"thermocline record: {error.message}", file=sys.stderr)
        return EXIT_BAD_ARGUMENTS if isinstance(error, OperatorError) else EXIT_FAILED
    print(
        f"{parsed.out}: inputs {recorded.first_seq} to {recorded.last_seq}, {recorded.outputs} outputs"
        f"{', starting at a snapshot' if recorded.starts_at_snapshot else ''}"
    )
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(guarded(main))
