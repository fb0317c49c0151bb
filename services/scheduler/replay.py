"""``thermocline replay FILE``: fold a recording again and compare every output byte for byte.

With ``--policy NAME`` it answers what-if instead: the same inputs under another eviction policy, side by side
with the recorded one. The workers' answers in a recording belong to the recorded decisions, so counters are
comparable up to the first differing output and indicative behind it; the answer says where that is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from services.scheduler import core
from services.scheduler.core.configure import configure
from services.scheduler.core.eviction import POLICIES
from services.scheduler.core.turn import Turn
from services.scheduler.fold import Fold, Folded, load_state
from services.scheduler.recording import Frame, Header, InputFrame, OutputFrame, SnapshotFrame, read_frames
from services.scheduler.snapshots import decode_snapshot
from services.scheduler.targets import target_of
from shared.codec import Published, decode_input, decode_published, encode
from shared.errors import CodecError, RecordingError, ThermoclineError
from shared.messages.cell_events import CellConfigured

EXIT_EQUAL, EXIT_DIFFERS, EXIT_BAD_FILE = 0, 1, 2

SHOWN_CHARACTERS = 600


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first output that is not what was recorded. "" stands for no output at all."""

    seq: int  # The input that was being folded.
    target: str
    number: int
    expected: str  # As recorded.
    got: str  # As the fold gives it now.

    def __str__(self) -> str:
        expected, got = self.expected or "(nothing)", self.got or "(nothing)"
        return (
            f"input {self.seq}: output {self.number} to {self.target} differs\n"
            f"  recorded: {_cut(expected)}\n  replayed: {_cut(got)}"
        )


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay found."""

    inputs: int
    outputs: int
    skipped: int
    first_seq: int
    last_seq: int
    unrecorded: int  # Outputs that the recording cannot have: their copies had expired or were still on their way.
    difference: Difference | None
    counters: dict[str, int]


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """Counters under the recorded policy and under another; ``diverged_seq`` is 0 where all outputs were equal."""

    policy: str
    recorded_policy: str
    inputs: int
    diverged_seq: int
    stopped_seq: int  # Where the recorded answers no longer fitted the other decisions; 0 is nowhere.
    recorded: dict[str, int]
    replayed: dict[str, int]


def replay(path: Path) -> Report:
    """Raises RecordingError for a file that is no whole, undamaged recording."""
    frames = read_frames(path)
    header, fold, frames = _begin(frames)
    comparison = _Comparison(header)
    inputs, last_seq = 0, fold.position
    for frame in frames:
        if comparison.difference is not None:
            continue  # Read on all the same, so that damage behind the first difference is reported as what it is.
        if isinstance(frame, OutputFrame):
            comparison.recorded(frame.data)
            continue
        comparison.close_input()
        if isinstance(frame, InputFrame) and comparison.difference is None:
            comparison.open_input(frame.seq, _apply(fold, frame).published)
            inputs, last_seq = inputs + 1, frame.seq
    comparison.end()
    return Report(
        inputs=inputs,
        outputs=comparison.compared,
        skipped=fold.skipped,
        first_seq=header.first_seq,
        last_seq=last_seq,
        unrecorded=comparison.unrecorded,
        difference=comparison.difference,
        counters=dict(fold.state.counters),
    )


def what_if(path: Path, policy: str) -> WhatIf:
    """Fold the recording twice: as it is, and with every configuration's policy replaced."""
    if policy not in POLICIES:
        raise RecordingError(f"there is no policy {policy!r}; known are {', '.join(sorted(POLICIES))}")
    _, recorded, frames = _begin(read_frames(path))
    _, other, _ = _begin(read_frames(path))
    configure(
        Turn(other.state, other.position, other.time_ns),
        msgspec.structs.replace(other.state.config, policy=policy),
    )
    inputs = diverged_seq = stopped_seq = 0
    for frame in frames:
        if not isinstance(frame, InputFrame):
            continue
        inputs += 1
        expected = _apply(recorded, frame).published
        if stopped_seq:
            continue
        try:
            got = _apply(other, _with_policy(frame, policy)).published
        except ThermoclineError:
            stopped_seq = frame.seq
            continue
        if not diverged_seq and [encode(one) for one in got] != [encode(one) for one in expected]:
            diverged_seq = frame.seq
    return WhatIf(
        policy=policy,
        recorded_policy=recorded.state.policy,
        inputs=inputs,
        diverged_seq=diverged_seq,
        stopped_seq=stopped_seq,
        recorded=dict(recorded.state.counters),
        replayed=dict(other.state.counters),
    )


class _Comparison:
    """Recorded outputs against those of the fold, one input at a time, up to the first difference."""

    def __init__(self, header: Header) -> None:
        self.compared = 0
        self.unrecorded = 0
        self.difference: Difference | None = None
        self._outputs_from_seq = header.outputs_from_seq
        self._seq = header.first_seq - 1
        self._waiting: deque[tuple[int, Published]] = deque()  # Folded, not matched yet: (input, output).
        self._complete_to_seq = header.complete_to_seq

    def open_input(self, seq: int, outputs: list[Published]) -> None:
        self._seq = seq
        if seq < self._outputs_from_seq:
            self.unrecorded += len(outputs)
        else:
            self._waiting.extend((seq, output) for output in outputs)

    def recorded(self, data: bytes) -> None:
        """The next output of the recording."""
        if self.difference is not None:
            return
        if not self._waiting:
            self.difference = _difference(self._seq, data, None)
            return
        seq, output = self._waiting.popleft()
        if encode(output) != data:
            self.difference = _difference(seq, data, output)
        else:
            self.compared += 1

    def close_input(self) -> None:
        """No more outputs of this input follow; one that waits is missing where the recording has them all."""
        if self.difference is None and self._waiting and self._waiting[0][0] <= self._complete_to_seq:
            self.difference = _difference(self._waiting[0][0], None, self._waiting[0][1])

    def end(self) -> None:
        """The recording is over."""
        self.close_input()
        if self.difference is None:
            self.unrecorded += len(self._waiting)


def _begin(frames: Iterator[Frame]) -> tuple[Header, Fold, Iterator[Frame]]:
    """Read header and snapshot; returns them as a fold, with the frames that remain."""
    header = next(frames)
    assert isinstance(header, Header)
    frame = next(frames)
    if not isinstance(frame, SnapshotFrame):
        fold = Fold(core.new_state(), position=header.first_seq - 1)
        if header.first_seq != 1:
            raise RecordingError(f"the recording starts at input {header.first_seq} without a snapshot")
        return header, fold, _chain(frame, frames)
    snapshot = decode_snapshot(frame.data)
    fold = Fold(load_state(snapshot.state), position=snapshot.seq, time_ns=snapshot.time_ns)
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


def _with_policy(frame: InputFrame, policy: str) -> InputFrame:
    try:
        message = decode_input(frame.data)
    except CodecError:
        return frame
    if not isinstance(message, CellConfigured):
        return frame
    replaced = msgspec.structs.replace(message, config=msgspec.structs.replace(message.config, policy=policy))
    return InputFrame(frame.seq, frame.time_ns, frame.subject, encode(replaced))


def _difference(seq: int, data: bytes | None, output: Published | None) -> Difference:
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
    )


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + f"… ({len(text)} characters)"


def _show_report(path: Path, report: Report) -> str:
    lines = [
        f"{path}: {report.inputs} inputs ({report.first_seq} to {report.last_seq}), {report.outputs} outputs equal"
    ]
    if report.skipped:
        lines.append(f"{report.skipped} stream messages were no inputs and were skipped, as in the live cell")
    if report.unrecorded:
        lines.append(f"{report.unrecorded} outputs are not in the recording: expired, or still on their way")
    lines.append(str(report.difference) if report.difference else "no difference")
    return "\n".join(lines)


def _show_what_if(path: Path, answer: WhatIf) -> str:
    names = sorted({*answer.recorded, *answer.replayed})
    width = max([len(name) for name in names] + [len("counter")])
    lines = [
        f"{path}: {answer.inputs} inputs under policy {answer.policy} instead of {answer.recorded_policy}",
        f"{'counter':<{width}} {answer.recorded_policy:>14} {answer.policy:>14} {'change':>14}",
    ]
    for name in names:
        before, after = answer.recorded.get(name, 0), answer.replayed.get(name, 0)
        lines.append(f"{name:<{width}} {before:>14} {after:>14} {after - before:>+14}")
    if answer.stopped_seq:
        lines.append(f"stopped at input {answer.stopped_seq}: the recorded answers no longer fit the decisions")
    if answer.diverged_seq:
        lines.append(f"decisions differ from input {answer.diverged_seq} on; counters behind it are indicative")
    else:
        lines.append("every decision is the same")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: equal (or what-if answered); 1: differs; 2: bad file or arguments."""
    parser = argparse.ArgumentParser(
        prog="thermocline replay", description="Fold a recording again and compare every output.", allow_abbrev=False
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="a recording made by 'thermocline record'")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--policy", metavar="NAME", help="what if: fold under this eviction policy instead")
    parsed = parser.parse_args(list(sys.argv[1:] if argv is None else argv))
    try:
        answer: Report | WhatIf
        answer = replay(parsed.file) if parsed.policy is None else what_if(parsed.file, parsed.policy)
    except ThermoclineError as error:
        _print_failure(error, as_json=parsed.json)
        return EXIT_BAD_FILE
    if isinstance(answer, WhatIf):
        print(json.dumps(msgspec.to_builtins(answer)) if parsed.json else _show_what_if(parsed.file, answer))
        return EXIT_EQUAL
    if parsed.json:
        fields: dict[str, Any] = msgspec.to_builtins(answer)
        print(json.dumps({"equal": answer.difference is None, **fields}))
    else:
        print(_show_report(parsed.file, answer))
    return EXIT_EQUAL if answer.difference is None else EXIT_DIFFERS


def _print_failure(error: ThermoclineError, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"error": {"code": error.code, "message": error.message}}))
    else:
        print(f"thermocline replay: {error.message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
