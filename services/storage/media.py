"""Opens the tiers that the settings name. A disk that cannot be used is left out: the storage serves without it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from services.storage import measures
from services.storage.backends import ChunkBackend
from services.storage.backends.disk import DiskBackend
from services.storage.backends.object_store import open_remote
from services.storage.cipher import Cipher, open_cipher
from services.storage.config import StorageConfig
from shared import logs
from shared.errors import ThermoclineError

_log = logs.get_logger("storage")


@dataclass(frozen=True, slots=True)
class Media:
    """What chunks are written to, and what encrypts them; None is none."""

    disk: ChunkBackend | None = None
    remote: ChunkBackend | None = None
    cipher: Cipher | None = None

    def close(self) -> None:
        """Let go of them. Blocking: writes under way are finished."""
        for backend in (self.disk, self.remote):
            if backend is not None:
                backend.close()


def open_media(config: StorageConfig) -> Media:
    """Blocking. Raises ConfigError when there are no keys where some are named, for nothing is to be in the clear
    then, and when ``remote`` names no object store that there could ever be.
    """
    cipher = open_cipher(config)
    remote = open_remote(config)
    return Media(_open_disk(config), remote, cipher)


def _open_disk(config: StorageConfig) -> ChunkBackend | None:
    if not config.disk_dir:
        return None
    started_s = time.perf_counter()
    try:
        disk = DiskBackend(config.disk_dir, is_direct_wanted=config.disk_direct)
    except (ThermoclineError, OSError) as error:
        measures.TIER_FAILURES.labels("disk").inc()
        _log.error("disk_left_out", directories=config.disk_dir, reason=str(error))
        return None
    _log.info("disk_opened", directories=config.disk_dir, seconds=round(time.perf_counter() - started_s, 3))
    return disk
