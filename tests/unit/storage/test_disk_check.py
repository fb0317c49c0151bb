"""Tiers that cannot be had are refused before a storage starts, with every reason at once."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from services.storage import disk_check
from services.storage.backends.disk import DiskBackend
from services.storage.config import StorageConfig
from services.storage.disk_check import check_tiers, tier_faults
from shared.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_check, "ENDING_S", 0.0)


def faults(*paths: Path, **settings: object) -> list[str]:
    config = StorageConfig(disk_dir=tuple(map(str, paths)), **({"disk_kv_bytes": 2**20} | settings))  # type: ignore[arg-type]
    return tier_faults(config)


def test_a_directory_that_can_be_used_is_no_fault(tmp_path: Path) -> None:
    """And nothing is left in it."""
    assert faults(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_every_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """A file, and one that does not exist."""
    (tmp_path / "file").touch()

    assert faults(tmp_path / "file", tmp_path / "missing", tmp_path) == [
        f"--disk-dir {tmp_path}/file is not a directory",
        f"--disk-dir {tmp_path}/missing does not exist",
    ]


def test_a_directory_that_cannot_be_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write whatever the mode says, so writing is what is tried."""

    def refuse(**where: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)

    assert faults(tmp_path) == [f"--disk-dir {tmp_path} cannot be written to: Permission denied"]


def test_a_read_only_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the flag of its mount."""
    sound = os.statvfs(tmp_path)
    read_only = os.statvfs_result((*sound[:8], sound.f_flag | os.ST_RDONLY, sound.f_namemax))
    monkeypatch.setattr(os, "statvfs", lambda path: read_only)

    assert faults(tmp_path) == [f"--disk-dir {tmp_path} is on a file system that is mounted read-only"]


def test_a_full_disk_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it holds can be read, and room may come."""

    def full(**where: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)

    assert faults(tmp_path) == []


def test_a_quota_beyond_the_file_system_is_refused(tmp_path: Path) -> None:
    """Directories of one file system have its size once; one that fits, or nearly, is not refused."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    system = os.statvfs(tmp_path)
    total = system.f_blocks * system.f_frsize

    assert faults(tmp_path / "one", tmp_path / "two", disk_kv_bytes=total) == []
    (fault,) = faults(tmp_path / "one", tmp_path / "two", disk_kv_bytes=total + 1)
    assert "--disk-kv-bytes is" in fault
    assert "choose less" in fault


def test_a_directory_that_another_storage_holds_is_refused(tmp_path: Path) -> None:
    """With what is known of the process."""
    holder = DiskBackend([str(tmp_path)])
    config = StorageConfig(disk_dir=(str(tmp_path),), disk_kv_bytes=2**20)
    (fault,) = tier_faults(config, lambda process: f"of cell {process}")
    holder.close()

    pid = os.getpid()
    assert fault.startswith(f"--disk-dir {tmp_path} is in use by process {pid} (of cell {pid})")
    assert tier_faults(config) == []


def test_settings_of_a_disk_without_one_are_refused() -> None:
    """They would be dropped in silence otherwise."""
    assert tier_faults(StorageConfig(disk_kv_bytes=2**30, sparse=True)) == [
        "--disk-kv-bytes is of no use without --disk-dir",
        "--sparse is of no use without --disk-dir",
    ]


def test_everything_is_told_at_once(tmp_path: Path) -> None:
    """A remote without sense beside a missing directory."""
    config = StorageConfig(disk_dir=(str(tmp_path / "missing"),), remote="ftp://somewhere")

    with pytest.raises(ConfigError, match=r"missing does not exist; --remote begins with ftp"):
        check_tiers(config)
