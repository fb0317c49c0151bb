"""Record the golden set of this release: ``python -m tests.compatibility.record``.

Done whenever a message, a field or a stored format is added before a release. What breaks the set that this release has
so far is refused, because a cell of yesterday's checkout may hold such bytes; ``--replace`` says that none does.
Sets of releases that are out are never written, whatever the flags.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import get_args

from services.scheduler import core
from services.scheduler.fold import Fold
from services.scheduler.recording import Header, InputFrame, read_frames
from services.scheduler.snapshots import encode_snapshot, take_snapshot
from shared.bus.protocol import StreamMessage
from shared.codec import Input, Published, encode
from shared.versions import FORMATS
from tests.compatibility import golden_sets as golden
from tests.compatibility import made_chunks
from tests.compatibility.golden_sets import Facts, GoldenSet
from tests.compatibility.instances import instance
from tests.compatibility.schema import breaks, message_types, schema_of, wire_name
from tests.recording_files import writing

_FOLDED = Path(__file__).parents[1] / "replay" / "recordings" / "disk.tcrec"
"""A run whose state has something in every tier."""

FIRST_SEQ = 7
TIME_NS = 1_700_000_000_000_000_000


def make() -> GoldenSet:
    """The set of the code as it is."""
    types = message_types()
    messages = {wire_name(each): encode(instance(each)) for each in types}
    chunks = made_chunks.make_all()
    facts = Facts(
        release=golden.current_release(),
        formats={each.name: each.version for each in FORMATS},
        chunks={name: told for name, (_, told) in chunks.items()},
    )
    return GoldenSet(
        facts=facts,
        schema=schema_of(types),
        messages=messages,
        chunks={name: blob for name, (blob, _) in chunks.items()},
        snapshot=_snapshot(),
        recording=_recording(messages),
    )


def _snapshot() -> bytes:
    """Of the state in the middle of a recorded run."""
    inputs = [frame for frame in read_frames(_FOLDED) if isinstance(frame, InputFrame)]
    fold = Fold(core.new_state())
    for frame in inputs[: 2 * len(inputs) // 3]:
        fold.apply(frame.message())
    return encode_snapshot(take_snapshot(fold))


def _recording(messages: dict[str, bytes]) -> bytes:
    """Every input, and behind the first every output that the scheduler can publish."""
    empty = encode_snapshot(take_snapshot(Fold(core.new_state(), position=FIRST_SEQ - 1, time_ns=TIME_NS)))
    header = Header(first_seq=FIRST_SEQ, outputs_from_seq=FIRST_SEQ, complete_to_seq=TIME_NS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "golden.tcrec"
        with writing(path, header) as writer:
            writer.write_snapshot(empty)
            for place, name in enumerate(names_of(Input)):
                writer.write_input(
                    StreamMessage(FIRST_SEQ + place, TIME_NS + place, f"tc.in.{name.lower()}", messages[name])
                )
                for published in names_of(Published) if place == 0 else ():
                    writer.write_output(messages[published])
        return path.read_bytes()


def has_unannounced_additions(earlier: GoldenSet, later: GoldenSet) -> bool:
    """Whether types of messages differ between two sets that give one version of the wire."""
    return earlier.schema != later.schema and earlier.facts.formats["wire"] == later.facts.formats["wire"]


def names_of(union: object) -> list[str]:
    """Names on the wire of the types of a union."""
    return [wire_name(each) for each in get_args(union)]


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 recorded, 1 refused."""
    parser = argparse.ArgumentParser(prog="python -m tests.compatibility.record", description="Record the golden set.")
    parser.add_argument(
        "--replace", action="store_true", help="although it breaks the set that this release has so far"
    )
    options = parser.parse_args(argv)
    made = make()
    release = made.facts.release
    unannounced = [earlier for earlier in golden.RELEASED if has_unannounced_additions(golden.load(earlier), made)]
    if unannounced:
        print(
            f"Messages were added to since {', '.join(unannounced)}: raise the minor version of wire in "
            "shared/versions.py first. Nothing was written.",
            file=sys.stderr,
        )
        return 1
    if release in golden.releases() and not options.replace:
        before = golden.load(release)
        faults = list(breaks(before.schema, made.schema)) if before.major("wire") == made.major("wire") else []
        if faults:
            print("\n".join(faults), file=sys.stderr)
            print("This breaks what was recorded before. Nothing was written; see --help.", file=sys.stderr)
            return 1
    try:
        place = golden.save(made)
    except golden.Released as refused:
        print(f"{refused}. Set the next version in pyproject.toml.", file=sys.stderr)
        return 1
    nbytes = sum(path.stat().st_size for path in place.iterdir())
    print(f"{place}: {len(made.messages)} messages, {len(made.chunks)} chunks, {nbytes} bytes in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
