"""Files for results: whole or not at all, and nothing else is replaced."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from shared.errors import OperatorError
from shared.result_file import check_writable, result_file, write_result


def test_a_result_that_fails_changes_nothing(tmp_path: Path) -> None:
    """The earlier one stays, and no other file is left; files of names that look like scratch files stay too."""
    path, beside = tmp_path / "out", tmp_path / "out.partial"
    path.write_bytes(b"earlier")
    beside.write_bytes(b"mine")

    def fail_half_way() -> None:
        with result_file(path) as file:
            file.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()

    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"out": b"earlier", "out.partial": b"mine"}


def test_a_result_replaces_the_earlier_one(tmp_path: Path) -> None:
    """Also under the longest name that a file can have."""
    path = tmp_path / ("x" * 255)
    for data in (b"first", b"second"):
        check_writable(path)
        write_result(path, data)

    assert path.read_bytes() == b"second"
    assert list(tmp_path.iterdir()) == [path]


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    """It is no file that could be replaced."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()), daemon=True)
    reader.start()
    check_writable(path)
    write_result(path, b"result")
    reader.join()

    assert read == [b"result"]
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    """In the file's own folder, also where it does not exist yet."""
    (tmp_path / "far").mkdir()
    link = tmp_path / "link"
    link.symlink_to("far/out")
    for data in (b"first", b"second"):
        check_writable(link)
        write_result(link, data)

    assert link.is_symlink()
    assert (tmp_path / "far" / "out").read_bytes() == b"second"
    assert [each.name for each in (tmp_path / "far").iterdir()] == ["out"]


def test_what_cannot_be_written_is_refused_before(tmp_path: Path) -> None:
    """With the reason, by the name of the flag."""
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    for path, reason in (
        (tmp_path, "it is a folder"),
        (Path(), "it is a folder"),
        (tmp_path / "no" / "out", "no is no folder"),
        (tmp_path / ("x" * 300), "File name too long"),
        (loop, "symbolic links"),
    ):
        with pytest.raises(OperatorError, match=rf"^--csv .* cannot be written: .*{reason}"):
            check_writable(path, "--csv")


def test_a_failure_is_one_line(tmp_path: Path) -> None:
    """Where a folder came into the file's place meanwhile."""
    with pytest.raises(OperatorError, match=r"^cannot write .*: Is a directory$"):
        write_result(tmp_path, b"result")
