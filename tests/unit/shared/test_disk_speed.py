"""A directory is measured once, and what was measured is found again where it holds."""

import json
from pathlib import Path

import pytest
from msgspec import structs

from shared import disk_speed
from shared.disk_speed import FILE_NAME, measure_disk, remember, remembered


def test_a_disk_is_measured_and_left_clean(tmp_path: Path) -> None:
    """Write, read and small reads have a speed; the file is gone."""
    figures = measure_disk(tmp_path, file_bytes=8 * 2**20)

    assert min(figures.write_bytes_per_s, figures.read_bytes_per_s, figures.small_read_bytes_per_s) > 0
    assert figures.directory == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_was_measured_is_remembered_in_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another machine it says nothing."""
    figures = measure_disk(tmp_path, file_bytes=4 * 2**20)
    assert remembered(tmp_path) is None

    remember(figures)

    assert remembered(tmp_path) == figures
    monkeypatch.setattr(disk_speed, "node_name", lambda: "another")
    assert remembered(tmp_path) is None


@pytest.mark.parametrize("damage", ["", "{}", "[1]", "version", "speed"])
def test_what_cannot_be_right_is_not_remembered(tmp_path: Path, damage: str) -> None:
    """A file that is torn, another's, of another version, or says that nothing is read."""
    figures = measure_disk(tmp_path, file_bytes=4 * 2**20)
    remember(structs.replace(figures, read_bytes_per_s=0.0) if damage == "speed" else figures)
    path = tmp_path / FILE_NAME
    if damage == "version":
        path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 2}))
    elif damage != "speed":
        path.write_text(damage)

    assert remembered(tmp_path) is None


def test_a_directory_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    """The caller is told."""
    figures = structs.replace(measure_disk(tmp_path, file_bytes=4 * 2**20), directory=str(tmp_path / "gone"))

    with pytest.raises(OSError, match="No such file"):
        remember(figures)
