"""Directories whose file system can be unmounted: by renaming, and by the kernel where that is allowed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import pytest

from services.storage.backends.file_calls import FileCalls

KINDS = ("pretended", "mounted")


class Disk(Protocol):
    """A directory that is a mount point, and its disk there."""

    path: str

    @property
    def calls(self) -> FileCalls:
        """The system calls of a storage that uses it."""

    def mount(self) -> None: ...

    def unmount(self) -> None: ...


class PretendedDisk(FileCalls):
    """Directories that are renamed; those with the file ``disk`` beside their chunks are on the device of its text."""

    def __init__(self, folder: Path) -> None:
        self.path, self.calls = str(folder / "mounted"), self
        self._away, self._below = folder / "away", folder / "below"
        self._away.mkdir()
        (self._away / "disk").write_text("7")
        os.mkdir(self.path)
        self.mount()

    def device(self, path: str) -> int:
        disk = Path(path, "disk")
        return int(disk.read_text()) if disk.exists() else 1

    def devices_above(self, path: str) -> frozenset[int]:
        return frozenset({1})

    def mount(self, disk: Path | None = None) -> None:
        os.rename(self.path, self._below)
        os.rename(disk or self._away, self.path)

    def unmount(self) -> None:
        os.rename(self.path, self._away)
        os.rename(self._below, self.path)


class MountedDisk:
    """A file system in memory, mounted by the kernel."""

    def __init__(self, folder: Path) -> None:
        self.path, self.calls = str(folder / "mounted"), FileCalls()
        self._disk = str(folder / "disk")
        os.mkdir(self._disk)
        os.mkdir(self.path)
        _run("mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", self._disk)
        self.mount()

    def mount(self) -> None:
        _run("mount", "--bind", self._disk, self.path)

    def unmount(self) -> None:
        _run("umount", "--lazy", self.path)

    def close(self) -> None:
        for path in (self.path, self._disk):
            if os.path.ismount(path):
                _run("umount", "--lazy", path)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def opened_disk(kind: str, folder: Path) -> Iterator[Disk]:
    """One of :data:`KINDS` in an empty folder, mounted. Skips the test where this user cannot mount."""
    if kind == "pretended":
        yield PretendedDisk(folder)
        return
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("only root can mount a file system")
    try:
        mounted = MountedDisk(folder)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no file system can be mounted here: {error.stderr!r}")
    try:
        yield mounted
    finally:
        mounted.close()
