"""One process per directory: a file lock, which the kernel releases however its holder ends."""

from __future__ import annotations

import errno
import fcntl
import os

from shared.errors import ConfigError


def holder(path: str) -> str:
    """Return which process holds the lock file ``path``, by its note: "" if none does, "unknown" without a note.

    Takes the lock for a moment where it is free. Raises OSError when there is a file that cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _note(fd)
    finally:
        os.close(fd)
    return ""


def _note(fd: int) -> str:
    return os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"


class DirectoryLock:
    """Holds ``path`` until :meth:`release`. The file says which process holds it and stays where it is."""

    def __init__(self, path: str) -> None:
        """Lock the directory.

        Raises ConfigError, naming the process, if another holds it (or this one, by another object).
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            note = _note(fd)
            os.close(fd)
            raise ConfigError(
                f"{os.path.dirname(path)} is in use by process {note}: every storage needs directories of its own"
            ) from error
        except OSError:
            os.close(fd)
            raise
        self._fd = fd
        self._path = path
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode("ascii"), 0)
        except OSError as error:
            # The lock holds without its note, and a disk that is full must still be read from.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                self.release()
                raise

    def is_in_place(self) -> bool:
        """Return whether the locked file still has its name: the directory was neither unmounted nor replaced.

        Raises OSError where that cannot be found out.
        """
        try:
            return self._fd >= 0 and os.path.samestat(os.fstat(self._fd), os.stat(self._path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Release the lock; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
