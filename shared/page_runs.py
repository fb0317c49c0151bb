"""Lists of page numbers as runs, because pages that were allocated together are nearly always consecutive.

A run is two little-endian int32: its first number, and the count of numbers from there on, each one more than the one
before. With a negative first number, which stands for no page, all numbers of the run are equal.
"""

from __future__ import annotations

from array import array
from struct import pack
from typing import Any

import numpy as np

from shared.errors import CodecError

MOST_PAGES = 1 << 22
"""Pages of one list at most: pages of one token each in a context of four million."""

_RUN_BYTES = 8
_MOST_NUMBER = 2**31 - 1

_FEW = 512
"""Pages up to which a list is read number by number: a few calls on arrays take longer, the more so where they are the
first in milliseconds.
"""


def runs_of(packed: bytes) -> bytes:
    """Return the runs of page numbers packed as int32, of any value."""
    if not packed:
        return b""
    if len(packed) <= 4 * _FEW:
        return _runs_of_few(memoryview(packed).cast("i"))
    pages = np.frombuffer(packed, dtype="<i4")
    begins = np.flatnonzero(pages[1:] - pages[:-1] != (pages[:-1] >= 0)) + 1
    starts = np.empty(len(begins) + 2, dtype=np.int64)
    starts[0], starts[1:-1], starts[-1] = 0, begins, len(pages)
    runs = np.empty((len(begins) + 1, 2), dtype="<i4")
    runs[:, 0], runs[:, 1] = pages[starts[:-1]], starts[1:] - starts[:-1]
    return runs.tobytes()


def _runs_of_few(pages: memoryview[int]) -> bytes:
    runs: list[int] = []
    begin, following = 0, pages[0]
    for place, page in enumerate(pages):
        if page != following:
            runs += (pages[begin], place - begin)
            begin = place
        following = page + 1 if page >= 0 else page
    return pack(f"<{len(runs) + 2}i", *runs, pages[begin], len(pages) - begin)


def pages_of(runs: bytes) -> bytes:
    """Return the page numbers of runs, packed int32.

    Raises CodecError for bytes that are no runs, or too many pages.
    """
    if len(runs) % _RUN_BYTES:
        raise CodecError(f"{len(runs)} bytes are no runs of pages")
    if not runs:
        return b""
    if len(runs) <= _RUN_BYTES * _FEW:
        few = _few_pages_of(memoryview(runs).cast("i").tolist())
        if few:
            return few
    firsts, counts = _columns(runs)
    total = int(counts.sum())
    if counts.min() < 1 or total > MOST_PAGES:
        raise CodecError(f"runs of {total} pages, the shortest of {counts.min()}, are no list")
    pages = firsts.repeat(counts)
    places = np.arange(total) - (counts.cumsum() - counts).repeat(counts)
    places[pages < 0] = 0
    packed: bytes = (pages + places).astype("<i4").tobytes()
    return packed


def _few_pages_of(runs: list[int]) -> bytes:
    """Return the page numbers of runs, packed int32; b"" where they are many, or are none."""
    counts = runs[1::2]
    if sum(counts) > _FEW or min(counts) < 1:
        return b""
    pages = array("i")
    for first, count in zip(runs[::2], counts, strict=True):
        if first + count - 1 > _MOST_NUMBER:
            return b""
        pages.extend(range(first, first + count) if first >= 0 else (first,) * count)
    return pages.tobytes()


def _columns(runs: bytes) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    pairs = np.frombuffer(runs, dtype="<i4").reshape(-1, 2).astype(np.int64)
    return pairs[:, 0], pairs[:, 1]
