"""The allocator of one pool's pages: sorted runs of free pages, first fit, contiguous where possible.

Attention on a CPU reads a contiguous run of pages twice as fast as scattered ones, so one run that is long
enough wins over lower page numbers. Page lists are packed little-endian int32, as on the wire.
"""

from __future__ import annotations

from bisect import bisect_left

import msgspec
import numpy as np

from shared.errors import InvariantViolated

# A badly fragmented pool has a run for every other page; looking at more of them costs more than it gains.
_RUNS_SEARCHED = 1024


class PagePool(msgspec.Struct):
    """Which pages of a pool are free, and how many of the others the prefix tree owns.

    ``starts`` and ``lengths`` describe the free runs in ascending order, never touching one another. ``cached``
    counts the pages that tree nodes own, ``locked`` those among them whose node a request uses. What is neither
    free nor cached is leased: private to a request, being loaded, or held by a transfer.
    """

    total: int
    starts: list[int]
    lengths: list[int]
    free: int
    cached: int = 0
    locked: int = 0

    @property
    def leased(self) -> int:
        """Pages that are neither free nor cached."""
        return self.total - self.free - self.cached


def new_pool(total: int) -> PagePool:
    """A pool of ``total`` free pages, numbered from 0."""
    return PagePool(total=total, starts=[0] if total else [], lengths=[total] if total else [], free=total)


def allocate(pool: PagePool, count: int) -> bytes | None:
    """Take ``count`` pages (packed), or return None and take nothing when fewer are free. Mutates the pool."""
    if count > pool.free:
        return None
    if count == 0:
        return b""
    pool.free -= count
    for index, length in enumerate(pool.lengths[:_RUNS_SEARCHED]):
        if length >= count:
            return _take(pool, index, count).tobytes()
    pieces = []
    while count:
        taken = min(count, pool.lengths[0])
        pieces.append(_take(pool, 0, taken))
        count -= taken
    return np.concatenate(pieces).tobytes()


def _take(pool: PagePool, index: int, count: int) -> np.ndarray:
    """The first ``count`` pages of a run, as int32."""
    start = pool.starts[index]
    if pool.lengths[index] == count:
        del pool.starts[index], pool.lengths[index]
    else:
        pool.starts[index] += count
        pool.lengths[index] -= count
    return np.arange(start, start + count, dtype="<i4")


def release(pool: PagePool, pages: bytes) -> None:
    """Give packed pages back. Mutates the pool; raises InvariantViolated when one of them is free already."""
    if not pages:
        return
    ordered = np.sort(np.frombuffer(pages, dtype="<i4"))
    if ordered[0] < 0 or ordered[-1] >= pool.total:
        raise InvariantViolated(f"pages {ordered[0]}..{ordered[-1]} are not all of a pool of {pool.total}")
    breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
    firsts = [0, *breaks.tolist()]
    ends = [*breaks.tolist(), len(ordered)]
    for first, end in zip(firsts, ends, strict=True):
        _put_run(pool, int(ordered[first]), end - first)
    pool.free += len(ordered)


def _put_run(pool: PagePool, start: int, length: int) -> None:
    """Insert a run, merged with the runs that it touches."""
    index = bisect_left(pool.starts, start)
    end = start + length
    touches_left = False
    if index > 0:
        left_end = pool.starts[index - 1] + pool.lengths[index - 1]
        if left_end > start:
            raise InvariantViolated(f"page {start} was released twice")
        touches_left = left_end == start
    touches_right = False
    if index < len(pool.starts):
        if pool.starts[index] < end:
            raise InvariantViolated(f"page {pool.starts[index]} was released twice")
        touches_right = pool.starts[index] == end
    if touches_left and touches_right:
        pool.lengths[index - 1] += length + pool.lengths[index]
        del pool.starts[index], pool.lengths[index]
    elif touches_left:
        pool.lengths[index - 1] += length
    elif touches_right:
        pool.starts[index] = start
        pool.lengths[index] += length
    else:
        pool.starts.insert(index, start)
        pool.lengths.insert(index, length)
