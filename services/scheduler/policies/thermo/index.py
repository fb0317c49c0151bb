"""An index of rows by a 64-bit key: chains of rows, in linear hashing (Litwin, VLDB 1980).

A row costs four bytes and its share of the buckets, where a dictionary would take ten times that. Buckets are split one
at a time, so that no insertion waits for all rows to be placed anew.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from services.scheduler.policies.thermo.columns import Wholes, column, grow, wholes

_FIRST_BUCKETS = 8
_SPARE = 63  # Rows added beyond the one that is needed.


class Index(msgspec.Struct):
    """Index of rows from 1 on; 0 is none. The keys are the caller's, a column with the key of each row."""

    buckets: Wholes = msgspec.field(default_factory=lambda: Wholes("I", [0] * _FIRST_BUCKETS))
    following: Wholes = wholes("I")  # By row: the next one in its chain.
    count: int = 0
    mask: int = _FIRST_BUCKETS - 1
    split: int = 0  # Buckets below this were split already, and are distinguished by one bit more.

    def find(self, keys: Wholes, key: int) -> int:
        """Return the row with this key, or 0."""
        # The low bits of a digest depend on the low bits of tokens only; the middle ones on all bits.
        mixed = key ^ key >> 29
        place = mixed & self.mask
        if place < self.split:
            place = mixed & (2 * self.mask + 1)
        row = self.buckets[place]
        while row and keys[row] != key:
            row = self.following[row]
        return row

    def find_all(self, keys: Wholes, wanted: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the row with each of these keys, or 0 (int64, in their shape), as :meth:`find` does."""
        buckets, following, all_keys = column(self.buckets), column(self.following), column(keys)
        mixed = wanted ^ wanted >> np.uint64(29)
        places = mixed & np.uint64(self.mask)
        places = np.where(places < self.split, mixed & np.uint64(2 * self.mask + 1), places)
        rows: NDArray[np.int64] = buckets[places].astype(np.int64)
        while (left := np.flatnonzero((rows != 0) & (all_keys[rows] != wanted))).size:
            rows[left] = following[rows[left]]
        return rows

    def add(self, keys: Wholes, row: int) -> None:
        """Add a row under its key, which no other row of the index may have."""
        place = self._place(keys[row])
        missing = row + 1 - len(self.following)
        if missing > 0:
            grow((self.following,), missing + _SPARE)
        self.following[row] = self.buckets[place]
        self.buckets[place] = row
        self.count += 1
        if self.count > len(self.buckets):
            self._split_one(keys)

    def remove(self, keys: Wholes, row: int) -> None:
        """Remove the row. Raises KeyError for one that is not in the index."""
        place, following = self._place(keys[row]), self.following
        at = self.buckets[place]
        if at == row:
            self.buckets[place] = following[row]
        else:
            while at and following[at] != row:
                at = following[at]
            if not at:
                raise KeyError(row)
            following[at] = following[row]
        self.count -= 1

    def _place(self, key: int) -> int:
        mixed = key ^ key >> 29
        place = mixed & self.mask
        return mixed & (2 * self.mask + 1) if place < self.split else place

    def _split_one(self, keys: Wholes) -> None:
        old = self.split
        self.buckets.append(0)
        self.split += 1
        if self.split > self.mask:
            self.mask, self.split = 2 * self.mask + 1, 0
        row, self.buckets[old] = self.buckets[old], 0
        while row:
            after = self.following[row]
            place = self._place(keys[row])
            self.following[row] = self.buckets[place]
            self.buckets[place] = row
            row = after
