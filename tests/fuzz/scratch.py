"""Decoders of files, given bytes: one file for each process, written again for every input."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

_descriptors: dict[int, tuple[int, Path]] = {}


def through_file(read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """``read`` of a path as a decoder of bytes. The file has no name, and is gone with the process."""

    def decode(data: bytes) -> object:
        descriptor, path = _scratch()
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, data, 0)
        return read(path)

    return decode


def _scratch() -> tuple[int, Path]:
    process = os.getpid()
    if process not in _descriptors:
        descriptor, name = tempfile.mkstemp()  # Of mode 0600, as files of keys must be.
        os.unlink(name)
        _descriptors[process] = descriptor, Path(f"/proc/self/fd/{descriptor}")
    return _descriptors[process]
