"""The table of versions says what the writers of each format write."""

from __future__ import annotations

import json

import msgspec
import pytest

from services.scheduler import core, recording, snapshots
from services.storage import chunk_format
from services.storage.sparse import layout
from shared import versions
from thermocline.__main__ import main


def test_the_table_is_what_is_written() -> None:
    """Formats that carry their version carry the major one of the table."""
    written = {
        versions.CHUNK: chunk_format.VERSION,
        versions.SPARSE: layout.VERSION,
        versions.RECORDING: recording.VERSION,
        versions.SNAPSHOT: snapshots.VERSION,
        versions.STATE: msgspec.msgpack.decode(core.encode_state(core.new_state()))["version"],
    }

    assert {each.name: each.major for each in written} == {each.name: number for each, number in written.items()}


def test_names_are_unique() -> None:
    """Each format is in the table once."""
    names = [each.name for each in versions.FORMATS]

    assert len(names) == len(set(names))


def test_the_command_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    """``thermocline version --json`` has the release and each format."""
    assert main(["version", "--json"]) == 0

    shown = json.loads(capsys.readouterr().out)
    assert shown["thermocline"] == versions.release()
    assert shown["formats"] == {each.name: f"{each.major}.{each.minor}" for each in versions.FORMATS}
