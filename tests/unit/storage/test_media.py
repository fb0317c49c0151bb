"""Opening the tiers: a disk that cannot be used does not end the start."""

from __future__ import annotations

from pathlib import Path

from services.storage.config import StorageConfig
from services.storage.media import open_media


def test_a_disk_that_cannot_be_used_is_left_out(tmp_path: Path) -> None:
    """The storage serves without it, and keeps the reason until it can be used."""
    missing = tmp_path / "missing"
    media = open_media(StorageConfig(disk_dir=(str(missing),)))

    assert media.disk is not None
    assert "No such file" in media.disk.left_out[str(missing)]
    media.close()


def test_a_directory_is_an_object_store(tmp_path: Path) -> None:
    """Both tiers open, and without keys nothing is encrypted."""
    (tmp_path / "disk").mkdir()
    media = open_media(StorageConfig(disk_dir=(str(tmp_path / "disk"),), remote=f"file://{tmp_path}/remote"))

    assert media.disk is not None
    assert media.remote is not None
    assert media.cipher is None
    media.close()
