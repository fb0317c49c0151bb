"""Logs of a cell are bounded while it runs."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from thermocline.supervisor.log_rotation import KEPT, rotate


def test_a_long_log_is_emptied_and_its_end_kept(tmp_path: Path) -> None:
    """Whoever has it open goes on writing to it; the oldest part is given up."""
    log, other = tmp_path / "worker-0.log", tmp_path / "gateway-0.log"
    other.write_bytes(b"short")
    with log.open("ab", buffering=0) as written:
        for number in range(KEPT + 2):
            written.write(b"%d" % number * 11)
            assert rotate(tmp_path, most_bytes=10) == [log]
        written.write(b"after")

    assert log.read_bytes() == b"after"
    assert other.read_bytes() == b"short"
    parts = {path.name: path.read_bytes() for path in tmp_path.glob("*.log.*")}
    assert parts == {f"worker-0.log.{number}": b"%d" % (KEPT + 2 - number) * 11 for number in range(1, KEPT + 1)}


def test_short_logs_and_none_are_left_alone(tmp_path: Path) -> None:
    """Whether there are any or not."""
    (tmp_path / "gateway-0.log").write_bytes(b"x" * 10)

    assert rotate(tmp_path, most_bytes=10) == []
    assert rotate(tmp_path / "nowhere") == []


def test_a_full_disk_costs_no_older_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rotation is tried again and again until there is room; each try used to push one part out."""
    log = tmp_path / "worker-0.log"
    for number in range(1, KEPT + 1):
        (tmp_path / f"worker-0.log.{number}").write_bytes(b"%d" % number)
    log.write_bytes(b"x" * 11)

    def copy_a_part(_source: Path, target: Path) -> None:
        target.write_bytes(b"x")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", copy_a_part)
    for _ in range(KEPT):
        with pytest.raises(OSError, match="No space"):
            rotate(tmp_path, most_bytes=10)

    parts = {path.name: path.read_bytes() for path in tmp_path.glob("*.log.*")}
    assert parts == {f"worker-0.log.{number}": b"%d" % number for number in range(1, KEPT + 1)}
    assert log.read_bytes() == b"x" * 11
