"""Files for results, as ``--out`` names them: whole or not at all, and pipes and devices are opened themselves."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from shared.errors import OperatorError, reason_of


class ResultFile:
    """A new file for ``path`` that takes its place by :meth:`keep`. Where a pipe or device is, that is opened instead.

    A link stays, and the file that it names is replaced.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, or the pipe, which waits for its reader. Raises OSError."""
        self._target = os.path.realpath(path)
        self._scratch = ""
        if path.exists() and not path.is_file():
            self.file: BinaryIO = path.open("wb")
            return
        # Short, because the name beside it may be as long as a name can be.
        scratch = os.path.join(os.path.dirname(self._target), f".thermocline-{secrets.token_hex(8)}.partial")
        self.file = open(scratch, "xb")  # noqa: SIM115 - closed by keep and drop.
        self._scratch = scratch

    def keep(self) -> None:
        """Complete the file and give it its name. Raises OSError."""
        self.file.flush()
        if self._scratch:
            os.fsync(self.file.fileno())
        self.file.close()
        if self._scratch:
            os.replace(self._scratch, self._target)
            self._scratch = ""

    def drop(self) -> None:
        """Remove the file unless it was kept."""
        with contextlib.suppress(OSError):
            self.file.close()
        if self._scratch:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._scratch)


@contextlib.contextmanager
def result_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a :class:`ResultFile`'s file, which is kept where the block ends without an exception. Raises OSError."""
    made = ResultFile(path)
    try:
        yield made.file
        made.keep()
    finally:
        made.drop()


def write_result(path: Path, data: bytes) -> None:
    """Write a whole result. Raises OperatorError."""
    try:
        with result_file(path) as file:
            file.write(data)
    except OSError as error:
        raise OperatorError(f"cannot write {path}: {reason_of(error)}") from error


def check_writable(path: Path, flag: str = "--out") -> None:
    """Raise OperatorError where a result could not be written; called before the run that makes the result."""
    fault = _fault(path)
    if fault:
        raise OperatorError(f"{flag} {path} cannot be written: {fault}")


def _fault(path: Path) -> str:
    folder = os.path.dirname(os.path.realpath(path))
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if not os.path.isdir(folder):
            return f"{folder} is no folder"
    except OSError as error:
        return reason_of(error)
    else:
        if stat.S_ISDIR(mode):
            return "it is a folder"
        if not stat.S_ISREG(mode):
            return "" if os.access(path, os.W_OK) else "you may not write to it"
    return "" if os.access(folder, os.W_OK) else f"you may not write to {folder}"
