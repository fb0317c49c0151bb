"""The allocator of one pool's pages: a map with a byte for every page, first fit, contiguous where possible.

Attention on a CPU reads a contiguous run of pages twice as fast as scattered ones, so one run that is long enough wins
over lower page numbers. Page lists are packed little-endian int32, as on the wire.

One byte is little beside a page's KV, and lets the search for a run be a search for a string, so that the cost of a
call does not depend on how fragmented the pool is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from shared.errors import InvariantViolated

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Pages of one search, to bound its time. Higher runs are found once the pages below them are taken.
_PAGES_SEARCHED = 1 << 15
# Pages scanned together, from a free one on, where no run is long enough.
_WINDOW = 1 << 14

MOST_PAGES = 2**31 - 1
"""Pages of a pool at most: page numbers are int32."""

_FREE = b"\x01"


class PagePool(msgspec.Struct):
    """The free pages of a pool, and the number of others that the prefix tree owns.

    ``free_map`` has a 1 for every free page and a 0 for every other; below ``lowest`` no page is free. ``cached``
    counts the pages that tree nodes own, ``locked`` those among them whose node a request uses. A page that is neither
    free nor cached is leased: private to a request, being loaded, or held by a transfer.
    """

    total: int
    free_map: bytearray
    free: int
    lowest: int = 0
    cached: int = 0
    locked: int = 0

    @property
    def leased(self) -> int:
        """Number of pages that are neither free nor cached."""
        return self.total - self.free - self.cached

    def can_free(self, pages: int) -> bool:
        """Return whether eviction could free so many pages without ending a request or transfer. Changes nothing."""
        return pages <= self.free + self.cached - self.locked

    def allocate(self, count: int) -> bytes | None:
        """Take ``count`` pages and return their numbers (packed int32); None, taking nothing, when fewer are free."""
        if count > self.free:
            return None
        if count == 0:
            return b""
        self.lowest = self.free_map.find(_FREE, self.lowest)
        self.free -= count
        start = self.free_map.find(_FREE * count, self.lowest, self.lowest + max(_PAGES_SEARCHED, count))
        if start < 0:
            return self._take_scattered(count)
        self.free_map[start : start + count] = bytes(count)
        return np.arange(start, start + count, dtype="<i4").tobytes()

    def _take_scattered(self, count: int) -> bytes:
        """Take the lowest ``count`` free pages, which exist."""
        view = np.frombuffer(self.free_map, dtype=np.bool_)
        pieces = []
        start = self.lowest
        while count:
            start = self.free_map.find(_FREE, start)  # Skips a long stretch without a free page at once.
            found = view[start : start + _WINDOW].nonzero()[0][:count] + start
            view[found] = False
            pieces.append(found.astype("<i4"))
            count -= len(found)
            start += _WINDOW
        return np.concatenate(pieces).tobytes()

    def release(self, pages: bytes) -> None:
        """Free packed pages. Raises InvariantViolated when one is free already or not of this pool."""
        if not pages:
            return
        count = len(pages) // 4
        first = int.from_bytes(pages[:4], "little", signed=True)
        if pages == np.arange(first, first + count, dtype="<i4").tobytes():
            self._check_bounds(first, first + count - 1)
            if self.free_map.find(_FREE, first, first + count) >= 0:
                raise InvariantViolated(f"one of the pages {first}..{first + count - 1} was released twice")
            self.free_map[first : first + count] = _FREE * count
        else:
            first = self._release_scattered(np.sort(np.frombuffer(pages, dtype="<i4")))
        self.free += count
        self.lowest = min(self.lowest, first)

    def _release_scattered(self, ordered: NDArray[np.int32]) -> int:
        """Mark these pages, in ascending order, as free; return the first."""
        first, last = int(ordered[0]), int(ordered[-1])
        self._check_bounds(first, last)
        view = np.frombuffer(self.free_map, dtype=np.bool_)
        if np.count_nonzero(view[ordered]) or np.count_nonzero(ordered[1:] == ordered[:-1]):
            raise InvariantViolated(f"one of the pages {first}..{last} was released twice")
        view[ordered] = True
        return first

    def _check_bounds(self, first: int, last: int) -> None:
        if first < 0 or last >= self.total:
            raise InvariantViolated(f"pages {first}..{last} are not all of a pool of {self.total}")


class LostPool(msgspec.Struct):
    """A pool that is gone while nodes still name it; pages named in it count as absent (see :mod:`pools`).

    ``left`` are ids of nodes still to be cleaned up, the next one at the end.
    """

    left: list[int] = []


def new_pool(total: int) -> PagePool:
    """Return a pool of ``total`` free pages, numbered from 0."""
    return PagePool(total=total, free_map=bytearray(_FREE * total), free=total)
