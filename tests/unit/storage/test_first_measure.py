"""A storage knows how fast its disk is read before it joins."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import structlog

from services.storage import first_measure
from services.storage.backends.disk import DiskBackend
from services.storage.config import StorageConfig
from services.storage.first_measure import disk_bytes_per_s
from services.storage.media import open_media
from shared.disk_speed import FILE_NAME, LARGE_BYTES, DiskFigures, remember
from shared.errors import ConfigError


def figures(directory: Path, read_bytes_per_s: float) -> DiskFigures:
    return DiskFigures(
        directory=str(directory),
        is_direct=True,
        write_bytes_per_s=1.0,
        read_bytes_per_s=read_bytes_per_s,
        small_read_bytes_per_s=1.0,
    )


class _Measuring:
    """Measures nothing, and says so."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[Path] = []
        self._error = error

    def __call__(self, directory: Path, *, file_bytes: int) -> DiskFigures:
        assert file_bytes % LARGE_BYTES == 0
        self.asked.append(directory)
        if self._error is not None:
            raise self._error
        return figures(directory, 7e8)


def test_a_disk_is_measured_at_the_first_start_alone(tmp_path: Path) -> None:
    """The second start finds what the first one measured."""
    measure, config = _Measuring(), StorageConfig(disk_dir=(str(tmp_path),))

    found = [disk_bytes_per_s(config, measure) for _ in range(2)]

    assert found == [7e8, 7e8]
    assert measure.asked == [tmp_path]


def test_what_the_doctor_measured_is_taken(tmp_path: Path) -> None:
    """In whichever of the directories; those of one file system are read no faster together."""
    other = tmp_path / "other"
    other.mkdir()
    remember(figures(tmp_path, 5e9))
    measure = _Measuring()

    assert disk_bytes_per_s(StorageConfig(disk_dir=(str(tmp_path), str(other))), measure) == 5e9
    assert measure.asked == []


@pytest.mark.parametrize("settings", [{"measure_at_start": False}, {"disk_read_bytes_per_s": 10**6}])
def test_a_disk_that_is_to_be_spared_is_not_measured(tmp_path: Path, settings: dict[str, int]) -> None:
    """Nor is one for which that was switched off; what is remembered counts."""
    measure, config = _Measuring(), StorageConfig(disk_dir=(str(tmp_path),), **settings)  # type: ignore[arg-type]
    assert disk_bytes_per_s(config, measure) == 0.0

    remember(figures(tmp_path, 5e9))

    assert disk_bytes_per_s(config, measure) == 5e9
    assert measure.asked == []


@pytest.mark.parametrize("error", [ConfigError("no room"), OSError(5, "Input/output error")])
def test_a_disk_that_cannot_be_measured_is_no_reason_not_to_serve(tmp_path: Path, error: Exception) -> None:
    """The storage joins without a figure, and says why."""
    with structlog.testing.capture_logs() as lines:
        found = disk_bytes_per_s(StorageConfig(disk_dir=(str(tmp_path),)), _Measuring(error))

    assert found == 0.0
    assert [line["reason"] for line in lines if line["event"] == "disk_not_measured"] == [str(error)]


def test_a_disk_that_hangs_when_it_is_asked_for_figures_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage joins without a figure."""
    gate = threading.Event()
    monkeypatch.setattr(first_measure, "MEASURE_S", 0.01)
    monkeypatch.setattr(first_measure, "remembered", lambda directory: gate.wait(60.0))

    assert disk_bytes_per_s(StorageConfig(disk_dir=(str(tmp_path),)), _Measuring()) == 0.0
    assert not gate.is_set()
    gate.set()


def test_a_directory_that_is_left_out_is_not_touched(tmp_path: Path) -> None:
    """The others are measured."""
    paths = [tmp_path / "held", tmp_path / "free"]
    for path in paths:
        path.mkdir()
    holder = DiskBackend([str(paths[0])])

    media = open_media(StorageConfig(disk_dir=tuple(map(str, paths))))

    assert media.disk_bytes_per_s > 0
    assert [(path / FILE_NAME).exists() for path in paths] == [False, True]
    media.close()
    holder.close()


def test_a_disk_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No longer than a measurement may take."""
    monkeypatch.setattr(first_measure, "MEASURE_S", 0.2)
    gate = threading.Event()

    def hang(directory: Path, *, file_bytes: int) -> DiskFigures:
        assert gate.wait(30.0)
        return figures(directory, 1e9)

    assert disk_bytes_per_s(StorageConfig(disk_dir=(str(tmp_path),)), hang) == 0.0
    gate.set()


def test_no_disk_has_no_speed(tmp_path: Path) -> None:
    """Nor has a directory that is not there."""
    assert disk_bytes_per_s(StorageConfig()) == 0.0
    assert disk_bytes_per_s(StorageConfig(disk_dir=(str(tmp_path / "gone"),)), _Measuring()) == 0.0


def test_the_tiers_are_opened_with_the_speed_of_their_disk(tmp_path: Path) -> None:
    """Measured for real, once."""
    config = StorageConfig(disk_dir=(str(tmp_path),))
    found = []
    for _ in range(2):
        media = open_media(config)
        media.close()
        found.append(media.disk_bytes_per_s)

    assert found[0] == found[1] > 0
