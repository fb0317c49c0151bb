"""The system calls of the disk tier, one method each: the seam at which tests count, fail or end a process."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from shared.errors import CapacityError, TransportError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_LACKING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)


class LacksMeans(TransportError):
    """The process or machine lacks descriptors or memory for a call, which says nothing about the file."""


class FileCalls:
    """Calls passed straight to the kernel. Every method raises OSError as the call does."""

    def open(self, path: str, flags: int) -> int:
        """Open for this process alone and return the descriptor; new files are the owner's only."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, fd: int) -> None:
        """Close the descriptor; it does not sync the file."""
        os.close(fd)

    def size(self, fd: int) -> int:
        """Return the file's size in bytes, by fstat."""
        return os.fstat(fd).st_size

    def device(self, path: str) -> int:
        """Return the number of the device that a directory's file system is on."""
        return os.stat(path).st_dev

    def devices_above(self, path: str) -> frozenset[int]:
        """Return the devices of all directories above this one, links followed."""
        found, below = set(), os.stat(path)
        # The kernel goes up: so a path of links needs not be resolved.
        while not os.path.samestat(above := os.stat(path := f"{path}/.."), below):
            found.add(above.st_dev)
            below = above
        return frozenset(found)

    def read(self, fd: int, into: memoryview, offset: int) -> int:
        """Read at byte ``offset`` into ``into``; return how many bytes were read, 0 at the end of the file."""
        return os.preadv(fd, [into], offset)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        """Write at byte ``offset``; return how many bytes were written, which may be fewer than given."""
        return os.pwrite(fd, data, offset)

    def sync_data(self, fd: int) -> None:
        """Make the file's data and size durable; its name need not be."""
        os.fdatasync(fd)

    def make_directory(self, path: str) -> None:
        """Make one directory, the owner's only; its parent must exist."""
        os.mkdir(path, 0o700)

    def remove_directory(self, path: str) -> None:
        """Remove one directory, which must be empty."""
        os.rmdir(path)

    def rename(self, source: str, target: str) -> None:
        """Rename atomically, replacing ``target`` if it exists."""
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        """Remove a file's name; open descriptors keep its data."""
        os.unlink(path)


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Turn OSError into CapacityError (the disk, or the quota on it, is full), LacksMeans or other TransportError."""
    try:
        yield
    except OSError as error:
        message = f"{what}: {error.strerror or error}"
        if error.errno in _FULL:
            raise CapacityError(message + _lacking_inodes(error.filename), code="disk_full") from error
        raise (LacksMeans if error.errno in _LACKING else TransportError)(message) from error


def _lacking_inodes(file: str | None) -> str:
    """Return the words for a file that could not be made for want of inodes: the file system may have many bytes."""
    try:
        system = os.statvfs(os.path.dirname(file)) if file else None
    except OSError:
        return ""
    is_lacking = system is not None and system.f_files > 0 and not system.f_favail
    return " (its file system has no inodes for more files)" if is_lacking else ""
