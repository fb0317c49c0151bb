"""Opens the tiers that the settings name. Directories that cannot be used are tried again while the storage serves."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from services.storage import measures
from services.storage.backends import Directories, RemoteBackend
from services.storage.backends.disk import DiskBackend
from services.storage.backends.object_store import open_remote
from services.storage.chunk_names import ChunkNames
from services.storage.cipher import Cipher, open_cipher
from services.storage.config import StorageConfig
from services.storage.first_measure import disk_bytes_per_s
from shared import logs, progress

_log = logs.get_logger("storage")


@dataclass(frozen=True, slots=True)
class Media:
    """The backends that chunks are written to, and their cipher; None is none."""

    disk: Directories | None = None
    remote: RemoteBackend | None = None
    cipher: Cipher | None = None
    names: ChunkNames = field(default_factory=ChunkNames)
    """Names used by disk and remote, of the same cipher."""
    disk_bytes_per_s: float = 0.0  # Measured read speed of the disk; 0 is not known.

    def close(self) -> None:
        """Close the backends. Blocking: writes under way are finished."""
        for backend in (self.disk, self.remote):
            if backend is not None:
                backend.close()


def open_media(config: StorageConfig) -> Media:
    """Open the backends and the cipher. Blocking.

    Raises ConfigError when there are no keys where some are named, so that nothing is written in the clear, when
    ``remote`` names no possible object store, and when a directory is named twice.
    """
    cipher = open_cipher(config)
    names = ChunkNames(cipher)
    remote = open_remote(config, names=names)
    disk = _open_disk(config, names)
    speed = disk_bytes_per_s(config, left_out=disk.left_out) if disk is not None else 0.0
    return Media(disk, remote, cipher, names, speed)


def _open_disk(config: StorageConfig, names: ChunkNames) -> Directories | None:
    if not config.disk_dir:
        return None
    started_s = time.perf_counter()
    with progress.phase("listing the disk", unit="chunks") as advance:
        disk = DiskBackend(config.disk_dir, is_direct_wanted=config.disk_direct, names=names, on_found=advance)
    if disk.left_out:
        measures.TIER_FAILURES.labels("disk").inc()
    _log.info("disk_opened", directories=config.disk_dir, seconds=round(time.perf_counter() - started_s, 3))
    return disk
