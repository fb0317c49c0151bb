"""Folders that a cell cannot write to are found before its start."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from thermocline.supervisor import folders
from thermocline.supervisor.folders import folder_faults, free_bytes


def test_a_good_folder_has_no_fault(tmp_path: Path) -> None:
    """One that is still to be made is judged by the folder above it."""
    assert folder_faults("--data-dir", tmp_path) == []
    assert folder_faults("--data-dir", tmp_path / "a" / "données") == []


def test_a_name_that_is_not_utf_8_is_a_fault(tmp_path: Path) -> None:
    """Records are JSON, and the broker's configuration is UTF-8."""
    path = Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9"))

    (fault,) = folder_faults("TMPDIR", path)

    assert fault.startswith("TMPDIR b'")
    assert "caf\\xe9': its name is not UTF-8" in fault


def test_a_full_disk_is_a_fault_with_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start there would end in the middle."""
    monkeypatch.setattr(folders, "free_bytes", lambda path: 4096)

    (fault,) = folder_faults("--data-dir", tmp_path)

    assert fault == f"--data-dir {tmp_path}: the disk is full (4,096 bytes are free, 1,048,576 are needed)"


def test_a_file_system_that_tells_no_sizes_has_room() -> None:
    """Such as /proc."""
    assert free_bytes(Path("/proc/self/none")) is None


def test_a_folder_that_is_still_to_be_made_has_the_room_of_the_one_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The room itself changes all the time."""
    free = {Path("/"): 7}
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=10, free=free[path]))

    assert free_bytes(Path("/none/at/all")) == 7
