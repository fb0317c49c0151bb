"""Measured speed of writing and reading a directory, past the page cache where the file system allows it.

The figures are kept in the directory itself, which may outlive caches of the machine. So a cell plans with the figures
of ``thermocline doctor --profile --disk-dir``, or else with those that its storage measured at its first start.
"""

from __future__ import annotations

import mmap
import os
import random
import tempfile
import time
from collections.abc import Callable
from math import inf
from pathlib import Path

import msgspec

from shared.errors import ConfigError
from shared.ids import node_name
from shared.undecodable import UNDECODABLE

FILE_NAME = "speed.json"
VERSION = 1

FILE_BYTES = 128 * 2**20
LARGE_BYTES = 4 * 2**20
SMALL_BYTES = 64 * 2**10
SMALL_READS = 256


class DiskFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A directory's bandwidths in bytes per second. ``is_direct``: measured past the page cache."""

    directory: str
    is_direct: bool
    write_bytes_per_s: float
    read_bytes_per_s: float
    small_read_bytes_per_s: float  # Reads of 64 KiB in random order.


class _Remembered(msgspec.Struct, frozen=True, kw_only=True):
    """Figures with the node that they hold for: a directory can be attached to another machine."""

    version: int = VERSION
    node: str
    disk: DiskFigures


def remember(figures: DiskFigures) -> None:
    """Write figures to a file in their directory, atomically. Raises OSError."""
    path = Path(figures.directory) / FILE_NAME
    scratch = path.with_name(f".{FILE_NAME}.{os.getpid()}")
    try:
        scratch.write_bytes(msgspec.json.encode(_Remembered(node=node_name(), disk=figures)))
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def remembered(directory: Path) -> DiskFigures | None:
    """Return the figures measured in a directory on this machine; None without any, or unreadable ones."""
    try:
        found = msgspec.json.decode((directory / FILE_NAME).read_bytes(), type=_Remembered)
    except (OSError, *UNDECODABLE):
        return None
    is_sound = found.version == VERSION and found.node == node_name() and 0 < found.disk.read_bytes_per_s < inf
    return found.disk if is_sound else None


def measure_disk(directory: Path, *, file_bytes: int = FILE_BYTES) -> DiskFigures:
    """Return the speed of a directory. Blocks. Raises ConfigError when the directory cannot be written.

    Writes a file of ``file_bytes`` (whole ``LARGE_BYTES``) in large pieces, reads it in large ones in order and in
    small ones in random order.
    """
    try:
        # Without a name, so that no file is left wherever this ends.
        with tempfile.TemporaryFile(dir=directory) as file:
            return _measure(Path(f"/proc/self/fd/{file.fileno()}"), str(directory), file_bytes)
    except OSError as error:
        raise ConfigError(f"cannot measure the directory {directory}: {error.strerror}") from error


def _measure(path: Path, directory: str, file_bytes: int) -> DiskFigures:
    # Anonymous mappings are aligned as direct I/O demands.
    buffer = mmap.mmap(-1, LARGE_BYTES)
    buffer.write(random.Random(0).randbytes(LARGE_BYTES))
    view = memoryview(buffer)
    fd, is_direct = _open(path)
    try:
        large = range(0, file_bytes, LARGE_BYTES)
        write_s = _timed(lambda: _write(fd, view, large))
        if not is_direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        read_s = _timed(lambda: [os.preadv(fd, [view], start) for start in large])
        if not is_direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        places = random.Random(1).choices(range(0, file_bytes - SMALL_BYTES + 1, SMALL_BYTES), k=SMALL_READS)
        small = view[:SMALL_BYTES]
        small_s = _timed(lambda: [os.preadv(fd, [small], start) for start in places])
        small.release()
    finally:
        os.close(fd)
        view.release()
        buffer.close()
    written = len(large) * LARGE_BYTES
    return DiskFigures(
        directory=directory,
        is_direct=is_direct,
        write_bytes_per_s=written / write_s,
        read_bytes_per_s=written / read_s,
        small_read_bytes_per_s=SMALL_READS * SMALL_BYTES / small_s,
    )


def _open(path: Path) -> tuple[int, bool]:
    """Open for reading and writing past the page cache; through it where the file system (tmpfs) refuses.

    Returns the descriptor and whether it is direct.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC), True
    except OSError:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC), False


def _write(fd: int, view: memoryview, places: range) -> None:
    for start in places:
        os.pwritev(fd, [view], start)
    os.fsync(fd)


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return max(1e-9, time.perf_counter() - started)
