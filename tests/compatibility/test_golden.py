"""Bytes of every release that has a golden set say today what they said then.

Where one of these fails after a change, either the change breaks what is stored and on its way in running cells, or a
major version has to go up (``shared/versions.py``); ``docs/reference/compatibility.md`` says which.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.scheduler import core
from services.scheduler.core.cache.eviction import POLICIES
from services.scheduler.core.fold.snapshot import EARLIER_VERSION, renewed
from services.scheduler.recording import End, Header, InputFrame, OutputFrame, SnapshotFrame, read_frames
from services.scheduler.snapshots import decode_snapshot
from shared.codec import Input, Published, decode, decode_input, decode_published, encode
from shared.errors import CodecError, RecordingError
from shared.versions import CHUNK, RECORDING, SNAPSHOT, SPARSE, STATE, WIRE, Format
from tests.compatibility import golden_sets as golden
from tests.compatibility import made_chunks, record
from tests.compatibility.golden_sets import GoldenSet
from tests.compatibility.record import FIRST_SEQ, TIME_NS, has_unannounced_additions, main, make, names_of
from tests.compatibility.schema import breaks, message_types, schema_of, wire_name

MAX_BYTES = 300 * 1024
"""Of one set: they stay for ever."""


@pytest.fixture(params=golden.releases())
def kept(request: pytest.FixtureRequest) -> GoldenSet:
    return golden.load(request.param)


def speaks(kept: GoldenSet, *formats: Format) -> None:
    """Skip the test where today's major version is another: such bytes need not be understood, only refused."""
    for each in formats:
        if kept.major(each.name) != each.major:
            pytest.skip(f"{each.name} has had major version {kept.major(each.name)} then")


def holds(new: Any, old: Any) -> bool:
    """Whether ``new`` says all that ``old`` says: equal but for further keys, and elements behind the last."""
    if isinstance(old, dict) and isinstance(new, dict):
        return all(key in new and holds(new[key], value) for key, value in old.items())
    if isinstance(old, list) and isinstance(new, list):
        return len(new) >= len(old) and all(map(holds, new, old))
    return type(new) is type(old) and bool(new == old)


def unpacked(state: bytes) -> Any:
    """A state as plain values, what policies wrote in bytes of their own included."""
    told = msgspec.msgpack.decode(state)
    for order in told["orders"].values():
        order[2] = msgspec.msgpack.decode(order[2])
    return told


def test_this_release_has_a_set() -> None:
    """It is what today's code would record. If not: python -m tests.compatibility.record, and commit the difference."""
    made, kept = make(), golden.load(golden.current_release())

    assert kept.facts == made.facts
    assert kept.schema == made.schema
    assert kept.messages == made.messages
    assert kept.chunks == made.chunks
    assert kept.recording == made.recording


def plain(data: bytes) -> bytes:
    """A message with the shortest header of each map. A struct of more than 15 fields has one of three bytes, however
    few of them are written, so the first field beyond them lengthens it.
    """
    return msgspec.msgpack.encode(msgspec.msgpack.decode(data))


def test_messages_are_still_understood(kept: GoldenSet) -> None:
    """Each decodes, and encodes to the same values in the same order: no field was lost, changed its type or moved.

    What replay compares, which is what the scheduler publishes, encodes to the same bytes.
    """
    speaks(kept, WIRE)
    types = {wire_name(each): each for each in message_types()}

    assert set(kept.messages) == set(kept.schema)
    for name, data in kept.messages.items():
        assert plain(encode(decode(data, types[name]))) == plain(data), name
        if name in names_of(Input):
            assert plain(encode(decode_input(data))) == plain(data), name
        if name in names_of(Published):
            assert encode(decode_published(data)) == data, name


def test_types_of_messages_keep_their_meaning(kept: GoldenSet) -> None:
    """No type or field is gone, retyped or moved, no default is another, and what is new has a default."""
    speaks(kept, WIRE)

    assert list(breaks(kept.schema, schema_of(message_types()))) == []


def test_additions_raise_the_minor_version(kept: GoldenSet) -> None:
    """What an earlier release did not have is announced by a higher minor version of the wire."""
    if kept.facts.release == golden.current_release():
        pytest.skip("it is this release's own set")
    speaks(kept, WIRE)

    assert not has_unannounced_additions(kept, make())


def test_chunks_are_still_read(kept: GoldenSet) -> None:
    """Each passes every check of today's readers, and holds the tokens and pages that it held: also those of version 1,
    which plain ones still have.
    """
    assert {kept.major(CHUNK.name), kept.major(SPARSE.name)} <= {1, 2}
    for name, blob in kept.chunks.items():
        facts = kept.facts.chunks[name]
        assert made_chunks.read(blob, facts) == facts, name


def test_snapshots_are_still_read_or_refused(kept: GoldenSet) -> None:
    """A state with today's major version or the one before is whole again; another is refused by its error.

    Where a policy's state has another version, the policies begin anew with what is cached, which is all there.
    """
    if kept.major("snapshot") != SNAPSHOT.major:
        with pytest.raises(RecordingError):
            decode_snapshot(kept.snapshot)
        return
    snapshot = decode_snapshot(kept.snapshot)
    earlier = kept.major("state") == EARLIER_VERSION
    if kept.major("state") != STATE.major and not earlier:
        with pytest.raises(CodecError):
            core.decode_state(snapshot.state)
        return

    state = core.decode_state(snapshot.state)

    core.check_invariants(state)
    assert state.tree.nodes
    assert snapshot.epoch == state.epoch
    now, then = (
        unpacked(core.encode_state(state)),
        unpacked(renewed(snapshot.state) if earlier else bytes(snapshot.state)),
    )
    policies = msgspec.msgpack.decode(snapshot.state)["orders"].values()
    if any(version != POLICIES[name].state_version for name, version, _ in policies):
        assert now.pop("orders").keys() <= then.pop("orders").keys()  # An empty pool has its policy when it is used.
    assert holds(now, then)


def test_recordings_are_still_read(kept: GoldenSet, tmp_path: Path) -> None:
    """Every frame is there and says what it said."""
    speaks(kept, RECORDING, WIRE)
    path = tmp_path / "golden.tcrec"
    path.write_bytes(kept.recording)

    header, snapshot, *body, end = read_frames(path)

    assert header == Header(first_seq=FIRST_SEQ, outputs_from_seq=FIRST_SEQ, complete_to_seq=TIME_NS)
    assert isinstance(snapshot, SnapshotFrame)
    assert decode_snapshot(snapshot.data).seq == FIRST_SEQ - 1
    inputs = [frame.message() for frame in body if isinstance(frame, InputFrame)]
    outputs = [frame.data for frame in body if isinstance(frame, OutputFrame)]
    assert end == End(inputs=len(inputs), outputs=len(outputs))
    assert [(each.seq, each.time_ns) for each in inputs] == [
        (FIRST_SEQ + place, TIME_NS + place) for place in range(len(inputs))
    ]
    assert {wire_name(type(decode_input(each.data))): each.data for each in inputs}.items() <= kept.messages.items()
    assert {wire_name(type(decode_published(data))): data for data in outputs}.items() <= kept.messages.items()


def test_released_sets_never_change() -> None:
    """Each has the digest that it had when its release was made, and only the set in development has none yet."""
    found = {release: golden.digest(release) for release in golden.releases() if release != golden.current_release()}

    assert found == golden.RELEASED


def test_released_sets_are_refused_to_the_recorder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the version of a release that is out, nothing is written, with ``--replace`` neither."""
    monkeypatch.setattr(golden, "current_release", lambda: "0.1.0")
    with pytest.raises(golden.Released, match=r"0\.1\.0 is out"):
        golden.save(make(), tmp_path)

    assert main(["--replace"]) == 1

    assert "0.1.0 is out" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert golden.digest("0.1.0") == golden.RELEASED["0.1.0"]


def test_additions_under_an_old_number_are_refused_to_the_recorder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A type that a release did not have, under that release's version of the wire, is not recorded."""
    made = make()
    formats = made.facts.formats | {"wire": golden.load("0.1.0").facts.formats["wire"]}
    facts = msgspec.structs.replace(made.facts, formats=formats)
    added = {"Other": msgspec.structs.replace(next(iter(made.schema.values())), name="Other")}
    monkeypatch.setattr(record, "make", lambda: replace(made, facts=facts, schema=made.schema | added))

    assert main([]) == 1
    assert "raise the minor version of wire" in capsys.readouterr().err


def test_sets_stay_small() -> None:
    """Each is kept for ever."""
    for release in golden.releases():
        assert sum(path.stat().st_size for path in (golden.FOLDER / release).iterdir()) < MAX_BYTES, release
