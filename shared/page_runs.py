"""Lists of page numbers as runs, because pages that were allocated together are nearly always consecutive.

A run is two little-endian int32: its first number, and the count of numbers from there on, each one more than the one
before. With a negative first number, which stands for no page, all numbers of the run are equal.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shared.errors import CodecError

MOST_PAGES = 1 << 22
"""Pages of one list at most: pages of one token each in a context of four million."""

_RUN_BYTES = 8


def runs_of(packed: bytes) -> bytes:
    """Return the runs of page numbers packed as int32, of any value."""
    pages = np.frombuffer(packed, dtype="<i4")
    if not len(pages):
        return b""
    begins = np.flatnonzero(pages[1:] - pages[:-1] != (pages[:-1] >= 0)) + 1
    starts = np.empty(len(begins) + 2, dtype=np.int64)
    starts[0], starts[1:-1], starts[-1] = 0, begins, len(pages)
    runs = np.empty((len(begins) + 1, 2), dtype="<i4")
    runs[:, 0], runs[:, 1] = pages[starts[:-1]], starts[1:] - starts[:-1]
    return runs.tobytes()


def pages_of(runs: bytes) -> bytes:
    """Return the page numbers of runs, packed int32.

    Raises CodecError for bytes that are no runs, or too many pages.
    """
    if len(runs) % _RUN_BYTES:
        raise CodecError(f"{len(runs)} bytes are no runs of pages")
    if not runs:
        return b""
    firsts, counts = _columns(runs)
    total = int(counts.sum())
    if counts.min() < 1 or total > MOST_PAGES:
        raise CodecError(f"runs of {total} pages, the shortest of {counts.min()}, are no list")
    pages = firsts.repeat(counts)
    places = np.arange(total) - (counts.cumsum() - counts).repeat(counts)
    places[pages < 0] = 0
    packed: bytes = (pages + places).astype("<i4").tobytes()
    return packed


def _columns(runs: bytes) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    pairs = np.frombuffer(runs, dtype="<i4").reshape(-1, 2).astype(np.int64)
    return pairs[:, 0], pairs[:, 1]
