"""Records of cells: only a folder and files of this user are trusted."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from shared.errors import ConfigError
from tests.unit.thermocline.supervisor.test_leftovers import make_record
from thermocline.supervisor.local_cell import admin_key
from thermocline.supervisor.process_identity import own_identity
from thermocline.supervisor.records import all_records, read_record, runs_dir, write_record

STRANGER = 12_345


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the folder of records, in a TMPDIR of the test's own; nothing is there yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"thermocline-{os.getuid()}"


def test_the_folder_is_made_for_its_user_alone(runs: Path) -> None:
    """And found again."""
    assert runs_dir() == runs_dir() == runs
    assert runs.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_write_to_is_refused(runs: Path) -> None:
    """A record names processes to kill and folders to remove."""
    runs.mkdir()
    for mode in (0o770, 0o702):
        runs.chmod(mode)
        with pytest.raises(ConfigError, match=f"{runs}: other users can write to it.*TMPDIR"):
            runs_dir()


def test_a_link_or_a_file_in_its_place_is_refused(runs: Path, tmp_path: Path) -> None:
    """Also a link to a good folder: another user may have made it."""
    good = tmp_path / "good"
    good.mkdir(mode=0o700)
    runs.symlink_to(good)
    with pytest.raises(ConfigError, match=f"{runs}: it is not a directory.*TMPDIR"):
        runs_dir()

    runs.unlink()
    runs.write_text("")
    with pytest.raises(ConfigError, match=f"{runs}: it is not a directory.*TMPDIR"):
        runs_dir()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_what_another_user_made_is_not_trusted(runs: Path) -> None:
    """Neither the folder nor a record in it."""
    record = make_record(runs, owner=own_identity(), prefix="tc-x")
    write_record(record, (runs_dir() / "mine.json", runs / "theirs.json"))
    os.chown(runs / "theirs.json", STRANGER, -1)

    assert [path.name for path, _ in all_records(runs)] == ["mine.json"]

    os.chown(runs, STRANGER, -1)
    with pytest.raises(ConfigError, match=f"{runs}: it belongs to user {STRANGER}.*TMPDIR"):
        runs_dir()
    assert admin_key("http://127.0.0.1:1") == ""


def test_a_folder_that_cannot_be_made_is_a_fault_of_the_setup(runs: Path) -> None:
    """With the path, the reason and the variable that moves it."""
    runs.parent.rmdir()

    with pytest.raises(ConfigError, match=f"{runs}: No such file or directory.*TMPDIR"):
        runs_dir()


def test_what_is_no_regular_file_is_no_record(tmp_path: Path) -> None:
    """A link, a folder and a pipe, which would be waited for."""
    write_record(make_record(tmp_path, owner=(1, 2), prefix="tc-x"), (tmp_path / "a.json",))
    (tmp_path / "link.json").symlink_to(tmp_path / "a.json")
    (tmp_path / "folder.json").mkdir()
    os.mkfifo(tmp_path / "pipe.json")

    assert [path.name for path, _ in all_records(tmp_path)] == ["a.json"]
    assert read_record(tmp_path / "none.json") is None
