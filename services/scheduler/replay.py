"""``thermocline replay FILE``: fold a recording again and compare every output byte for byte.

The first difference ends the comparison: what follows from it would differ too and explain nothing. It is shown
field by field, with the input that was being folded.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from services.scheduler import core
from services.scheduler.fold import Fold, Folded, load_state
from services.scheduler.fold_release import fold_release
from services.scheduler.outside import load_all, missing, unknown_in
from services.scheduler.quarantine import Skips
from services.scheduler.recording import Frame, Header, InputFrame, OutputFrame, SnapshotFrame, read_frames
from services.scheduler.snapshots import decode_snapshot
from services.scheduler.targets import Target, target_of
from shared.arguments import JSON_HELP, ArgumentParser
from shared.codec import Input, Published, decode_published, encode
from shared.errors import CodecError, PolicyMissing, RecordingError, ThermoclineError
from shared.guard import guarded
from shared.messages.base import unpack_int32
from shared.messages.cell_events import CellConfigured
from shared.progress_line import shown

EXIT_EQUAL, EXIT_DIFFERS, EXIT_BAD_FILE = 0, 1, 2

SHOWN_CHARACTERS = 600
SHOWN_IN_FIELD = 120
SHOWN_FIELDS = 12


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first output that differs from the recorded one. "" stands for no output at all."""

    seq: int  # The input that was being folded.
    target: str
    number: int
    expected: str  # As recorded.
    got: str  # As the fold gives it now.
    input: str = ""  # The input that was being folded.
    fields: tuple[tuple[str, str, str], ...] = ()  # (path, recorded, replayed) of each field that differs.

    def __str__(self) -> str:
        """Return lines with the input, the fields that differ and both outputs, long ones cut."""
        expected, got = self.expected or "(nothing)", self.got or "(nothing)"
        lines = [f"input {self.seq}: output {self.number} to {self.target} differs"]
        if self.input:
            lines.append(f"  while folding: {_cut(self.input)}")
        lines += [
            f"  {path}: recorded {_cut(recorded, SHOWN_IN_FIELD)}, replayed {_cut(replayed, SHOWN_IN_FIELD)}"
            for path, recorded, replayed in self.fields
        ]
        return "\n".join([*lines, f"  recorded: {_cut(expected)}", f"  replayed: {_cut(got)}"])


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a replay: what was folded and compared, and the first difference."""

    inputs: int
    outputs: int
    skipped: int
    first_seq: int
    last_seq: int
    unrecorded: int  # Outputs that the recording cannot have: they had expired or were still in flight.
    difference: Difference | None
    counters: dict[str, int]
    release: str = ""  # Of the fold that was recorded, see fold_release; "" where the recording does not say.
    notes: tuple[str, ...] = ()  # Sentences on policies that begin anew here, or that are not here.


def replay(path: Path) -> Report:
    """Replay a recording and return the comparison.

    Raises RecordingError for a file that is not whole and undamaged, PolicyMissing without the code of a policy that it
    was made with, and what ends a fold.
    """
    notes: list[str] = []
    header, fold, frames = _begin(read_frames(path), recorded_skips(path), notes)
    comparison = _Comparison(header)
    unknown: list[str] = []
    inputs, last_seq = 0, fold.position
    for frame in frames:
        if comparison.difference is not None:
            continue  # Read on, so that damage behind the first difference is reported as damage.
        if isinstance(frame, OutputFrame):
            comparison.recorded(frame.data)
            continue
        comparison.close_input()
        if isinstance(frame, InputFrame) and comparison.difference is None:
            folded = _apply(fold, frame)
            comparison.open_input(frame.seq, folded)
            if isinstance(folded.input, CellConfigured):
                unknown += unknown_in(folded.input.config)
            inputs, last_seq = inputs + 1, frame.seq
    comparison.end()
    if comparison.difference is not None and unknown:
        raise PolicyMissing.of("the recording", unknown[0])
    return Report(
        inputs=inputs,
        outputs=comparison.compared,
        skipped=fold.skipped,
        first_seq=header.first_seq,
        last_seq=last_seq,
        unrecorded=comparison.unrecorded,
        difference=comparison.difference,
        counters=dict(fold.state.counters),
        release=header.release,
        notes=(*notes, *(f"{each} is not registered here, and was not applied" for each in unknown)),
    )


def recorded_skips(path: Path) -> Skips:
    """Return what a recording says of its inputs that fail or are left out. Reads the whole file."""
    skips = Skips()
    for frame in read_frames(path):
        if isinstance(frame, InputFrame):
            skips.note(frame.message())
    return skips


_At = tuple[int, Input | None]
"""Sequence of an input, and the input where it could be decoded."""


class _Comparison:
    """Comparison of recorded outputs with the fold's, one input at a time, up to the first difference.

    Those of one target must come in order. Across targets they need not: each target executes its own.
    """

    def __init__(self, header: Header) -> None:
        self.compared = 0
        self.unrecorded = 0
        self.difference: Difference | None = None
        self._outputs_from_seq = header.outputs_from_seq
        self._at: _At = (header.first_seq - 1, None)
        self._waiting: dict[Target, deque[tuple[_At, Published]]] = {}  # Folded, not matched yet; none is empty.
        self._complete_to_seq = header.complete_to_seq

    def open_input(self, seq: int, folded: Folded) -> None:
        self._at = (seq, folded.input)
        if seq < self._outputs_from_seq:
            self.unrecorded += len(folded.published)
        else:
            for output in folded.published:
                self._waiting.setdefault(target_of(output), deque()).append((self._at, output))

    def recorded(self, data: bytes) -> None:
        """Compare the next output of the recording."""
        if self.difference is not None:
            return
        target = self._target_of(data)
        waiting = self._waiting.get(target)
        if waiting is None:
            self.difference = _difference(self._at, data, None)
            return
        at, output = waiting.popleft()
        if not waiting:
            del self._waiting[target]
        if encode(output) != data:
            self.difference = _difference(at, data, output)
        else:
            self.compared += 1

    def close_input(self) -> None:
        """End an input's outputs; one not matched by now is missing, where the recording has them all."""
        if self.difference is None and self._waiting:
            at, output = min((waiting[0] for waiting in self._waiting.values()), key=lambda first: first[0][0])
            if at[0] <= self._complete_to_seq:
                self.difference = _difference(at, None, output)

    def end(self) -> None:
        """End the recording: outputs that are not matched count as unrecorded, unless one is missing."""
        self.close_input()
        if self.difference is None:
            self.unrecorded += sum(map(len, self._waiting.values()))

    def _target_of(self, data: bytes) -> Target:
        try:
            return target_of(decode_published(data))
        except CodecError as error:
            raise RecordingError(f"an output behind input {self._at[0]} cannot be decoded: {error.message}") from error


def require_policies(header: Header) -> None:
    """Raise PolicyMissing where a recording was made with a policy whose code is not here."""
    absent = missing(header.policies)
    if absent:
        raise PolicyMissing.of("the recording", ", ".join(absent))


def _begin(frames: Iterator[Frame], skips: Skips, notes: list[str]) -> tuple[Header, Fold, Iterator[Frame]]:
    """Read header and snapshot; return the header, their fold, and the frames that remain."""
    header = next(frames)
    assert isinstance(header, Header)
    require_policies(header)
    frame = next(frames)
    if not isinstance(frame, SnapshotFrame):
        fold = Fold(core.new_state(), position=header.first_seq - 1, skips=skips.decided)
        if header.first_seq != 1:
            raise RecordingError(f"the recording starts at input {header.first_seq} without a snapshot")
        return header, fold, _chain(frame, frames)
    snapshot = decode_snapshot(frame.data)
    state = load_state(snapshot.state, notes.append)
    if not skips.suit(state, snapshot.seq):
        raise RecordingError(
            f"the snapshot of input {snapshot.seq} holds an input that was left out later; record again"
        )
    fold = Fold(state, position=snapshot.seq, time_ns=snapshot.time_ns, skips=skips.decided)
    if header.first_seq != snapshot.seq + 1:
        raise RecordingError(f"the snapshot is of input {snapshot.seq}, but the first input is {header.first_seq}")
    return header, fold, frames


def _chain(first: Frame, rest: Iterator[Frame]) -> Iterator[Frame]:
    yield first
    yield from rest


def _apply(fold: Fold, frame: InputFrame) -> Folded:
    if frame.seq != fold.position + 1:
        raise RecordingError(f"input {frame.seq} follows input {fold.position}: inputs are missing")
    return fold.apply(frame.message())


def _difference(at: _At, data: bytes | None, output: Published | None) -> Difference:
    seq, folded = at
    recorded: Published | None = None
    if data is not None:
        try:
            recorded = decode_published(data)
        except CodecError as error:
            raise RecordingError(f"an output behind input {seq} cannot be decoded: {error.message}") from error
    shown = recorded if recorded is not None else output
    assert shown is not None
    return Difference(
        seq=seq,
        target=str(target_of(shown)),
        number=shown.number,
        expected="" if recorded is None else repr(recorded),
        got="" if output is None else repr(output),
        input="" if folded is None else repr(folded),
        fields=tuple(islice(_differing_fields("output", recorded, output), SHOWN_FIELDS))
        if recorded is not None and output is not None
        else (),
    )


def _differing_fields(path: str, recorded: Any, replayed: Any) -> Iterator[tuple[str, str, str]]:
    """Yield (path, recorded, replayed) where two outputs differ, outermost first."""
    if recorded == replayed:
        return
    if isinstance(recorded, msgspec.Struct) and type(recorded) is type(replayed):
        for name in recorded.__struct_fields__:
            yield from _differing_fields(f"{path}.{name}", getattr(recorded, name), getattr(replayed, name))
    elif isinstance(recorded, tuple | list) and isinstance(replayed, tuple | list):
        if len(recorded) != len(replayed):
            yield f"len({path})", str(len(recorded)), str(len(replayed))
        for index, (one, other) in enumerate(zip(recorded, replayed, strict=False)):
            yield from _differing_fields(f"{path}[{index}]", one, other)
    elif isinstance(recorded, bytes) and isinstance(replayed, bytes):
        yield path, _show_bytes(recorded), _show_bytes(replayed)
    else:
        yield path, repr(recorded), repr(replayed)


def _show_bytes(data: bytes) -> str:
    """Return packed int32 as numbers; nearly all byte fields of outputs are tokens or pages."""
    if len(data) % 4:
        return f"{len(data)} bytes {data[:16].hex()}"
    shown = ", ".join(str(value) for value in unpack_int32(data[:64]))
    return f"{len(data) // 4} numbers [{shown}{', …' if len(data) > 64 else ''}]"


def _cut(text: str, most: int = SHOWN_CHARACTERS) -> str:
    return text if len(text) <= most else text[:most] + f"… ({len(text)} characters)"


def _show_report(path: Path, report: Report) -> str:
    lines = [
        f"{path}: {report.inputs} inputs ({report.first_seq} to {report.last_seq}), {report.outputs} outputs equal"
    ]
    if report.skipped:
        lines.append(
            f"{report.skipped} stream messages were no inputs, or in quarantine, and were skipped, as in the live cell"
        )
    if report.unrecorded:
        lines.append(f"{report.unrecorded} outputs are not in the recording: expired, or still in flight")
    lines += report.notes
    lines.append(str(report.difference) if report.difference else "no difference")
    if report.difference and report.release not in ("", fold_release()):
        lines.append("another release made these outputs, which may decide differently: replay with the one that did")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0: equal; 1: differs; 2: bad file or arguments."""
    parser = ArgumentParser(prog="thermocline replay", description="Fold a recording again and compare every output.")
    parser.add_argument("file", metavar="FILE", type=Path, help="a recording made by `thermocline record`")
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    add_load_flag(parser)
    parsed = parser.parse_args(argv)
    try:
        load_all(parsed.load)
        with shown(f"folding {parsed.file.name}"):
            report = replay(parsed.file)
    except ThermoclineError as error:
        print_failure(error, as_json=parsed.json)
        return EXIT_BAD_FILE
    if parsed.json:
        fields: dict[str, Any] = msgspec.to_builtins(report)
        print(json.dumps({"equal": report.difference is None, **fields}))
    else:
        print(_show_report(parsed.file, report))
    return EXIT_EQUAL if report.difference is None else EXIT_DIFFERS


def add_load_flag(parser: ArgumentParser) -> None:
    """Add ``--load``, which names classes to import: a recording never causes an import by itself."""
    parser.add_argument(
        "--load",
        action="append",
        default=[],
        metavar="MODULE:CLASS",
        help="a policy, schedule or admission that the recording was made with and no installed package offers",
    )


def print_failure(error: ThermoclineError, *, as_json: bool) -> None:
    """Print why there is no report: on stdout as JSON, on stderr otherwise."""
    if as_json:
        print(json.dumps({"error": {"code": error.code, "message": error.message}}))
    else:
        print(f"thermocline replay: {error.message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(guarded(main))
