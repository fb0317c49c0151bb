"""Loading of the C files of this folder; :mod:`shared.native.build` compiles them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path

from shared.native import build
from shared.native.build import Mirror, NotCompiled, announce_missing, missing

__all__ = ["NotCompiled", "announce_missing", "load", "missing"]

_SOURCES = Path(__file__).parent


def load(name: str, flags: Sequence[str], constants: Mapping[str, int], mirrors: Mapping[str, Mirror]) -> ctypes.CDLL:
    """Load the library of ``name``.c; see :func:`shared.native.build.load`."""
    return build.load(_SOURCES / f"{name}.c", flags, constants, mirrors)
