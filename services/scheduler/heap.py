"""What glibc's heap keeps of freed memory. With other C libraries nothing here does anything."""

from __future__ import annotations

import ctypes
import sys

KEPT_BYTES = 2**30
"""Free bytes at the end of the heap, above which they are returned to the system."""

LARGEST_BYTES = 2**25
"""Largest block that the heap serves; glibc takes no larger value. Others are mapped apart, and unmapped when freed."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_heap() -> None:
    """Keep freed memory for what is allocated next, until :func:`trim_heap`.

    By default the end of the heap is returned and taken again with every message of a large snapshot, and the kernel
    clears each page of it anew: of a restart with a million nodes these were two seconds of five.
    """
    mallopt = _function("mallopt")
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGEST_BYTES)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def trim_heap() -> None:
    """Return free memory of the heap to the system: 45 bytes per node at a million nodes, in 3 ms.

    The less this process maps, the less ``fork`` has to copy.
    """
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


def _function(name: str) -> ctypes._NamedFuncPointer | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
