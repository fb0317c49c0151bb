"""Tiers to run the conformance suite against, each with what may befall it. Add a kind to :data:`KINDS`."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from services.storage.backends import ChunkBackend
from services.storage.backends.disk import DiskBackend
from services.storage.backends.file_calls import FileCalls
from tests.conformance.object_stores import OBJECT_STORES
from tests.memory_backend import MemoryBackend

MAX_BYTES = 64 * 2**20
TIMEOUT_S = 60.0
"""The time that the suite gives to each call, far more than any needs: a tier that is broken says so by itself."""


class Tier(Protocol):
    """One tier, empty at first."""

    is_durable: bool
    """Whether chunks outlive the backend object."""

    @property
    def backend(self) -> ChunkBackend:
        """The tier as a storage uses it."""

    def fill(self) -> None:
        """From now on there is no room for another chunk."""

    def break_down(self) -> None:
        """From now on it cannot be reached, or is broken."""

    def mend(self) -> None:
        """Neither full nor broken any more."""

    def reopen(self) -> None:
        """Close the backend, and make another one of the same place."""

    def close(self) -> None:
        """Nothing is left of it."""


class MemoryTier:
    """This process's memory."""

    is_durable = False

    def __init__(self) -> None:
        self._memory = MemoryBackend(max_bytes=MAX_BYTES)
        self.backend: ChunkBackend = self._memory

    def fill(self) -> None:
        self._memory.max_bytes = 0

    def break_down(self) -> None:
        self._memory.is_reachable = False

    def mend(self) -> None:
        self._memory.max_bytes, self._memory.is_reachable = MAX_BYTES, True

    def reopen(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.backend.close()


class FailingCalls(FileCalls):
    """System calls that fail while ``failure`` is set: writes after the first half if full, all calls if broken.

    ``fail_once_at`` lets one coming call fail: 0 is the next one.
    """

    def __init__(self) -> None:
        self.failure = 0
        self.fail_once_at = -1
        self._lock = threading.Lock()

    def _pass(self) -> None:
        with self._lock:
            if self.fail_once_at >= 0:
                self.fail_once_at -= 1
                if self.fail_once_at < 0:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
        if self.failure == errno.EIO:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def open(self, path: str, flags: int) -> int:
        self._pass()
        return super().open(path, flags)

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        self._pass()
        return super().read(fd, into, offset)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        self._pass()
        if self.failure and offset:
            raise OSError(self.failure, os.strerror(self.failure))
        return super().write(fd, data[: 4096 if self.failure else None], offset)

    def sync_data(self, fd: int) -> None:
        self._pass()
        super().sync_data(fd)

    def make_directory(self, path: str) -> None:
        self._pass()
        super().make_directory(path)

    def rename(self, source: str, target: str) -> None:
        self._pass()
        super().rename(source, target)

    def unlink(self, path: str) -> None:
        self._pass()
        super().unlink(path)


class DiskTier:
    """Directories whose system calls can be made to fail."""

    is_durable = True

    def __init__(self, folder: Path, directories: int) -> None:
        self.paths = [str(folder / f"disk-{number}") for number in range(directories)]
        for path in self.paths:
            os.mkdir(path)
        self.calls = FailingCalls()
        self.backend: ChunkBackend = DiskBackend(self.paths, calls=self.calls)

    def fill(self) -> None:
        self.calls.failure = errno.ENOSPC

    def break_down(self) -> None:
        self.calls.failure = errno.EIO

    def mend(self) -> None:
        self.calls.failure = 0

    def reopen(self) -> None:
        self.backend.close()
        self.backend = DiskBackend(self.paths, calls=self.calls)

    def close(self) -> None:
        self.backend.close()


KINDS: dict[str, Callable[[Path], Tier]] = {
    "memory": lambda folder: MemoryTier(),
    "disk": lambda folder: DiskTier(folder, 1),
    "three_disks": lambda folder: DiskTier(folder, 3),
    **OBJECT_STORES,
}
"""How to make an empty tier of each kind in an empty folder."""
