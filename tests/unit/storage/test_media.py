"""Opening the tiers: what is wrong with the settings ends the start, what is wrong with a disk does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.storage.backends import Directories
from services.storage.config import StorageConfig
from services.storage.media import open_media
from shared.errors import ConfigError


def test_a_url_of_no_object_store_is_refused() -> None:
    """Nobody would notice that such a tier never existed."""
    with pytest.raises(ConfigError, match="ftp"):
        open_media(StorageConfig(remote="ftp://somewhere/else"))


def test_a_disk_that_cannot_be_used_is_left_out(tmp_path: Path) -> None:
    """The storage serves without it, and keeps the reason until it can be used."""
    missing = tmp_path / "missing"
    media = open_media(StorageConfig(disk_dir=(str(missing),)))

    assert isinstance(media.disk, Directories)
    assert "No such file" in media.disk.left_out[str(missing)]
    media.close()


def test_a_directory_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    """Whichever way it is written."""
    with pytest.raises(ConfigError, match="twice"):
        open_media(StorageConfig(disk_dir=(str(tmp_path), f"{tmp_path}/.")))


def test_a_directory_is_an_object_store(tmp_path: Path) -> None:
    """Both tiers open, and without keys nothing is encrypted."""
    (tmp_path / "disk").mkdir()
    media = open_media(StorageConfig(disk_dir=(str(tmp_path / "disk"),), remote=f"file://{tmp_path}/remote"))

    assert media.disk is not None
    assert media.remote is not None
    assert media.cipher is None
    media.close()
