"""Checks of rows before they may be used, against checksums that the storage wrote beside the pages.

A checksum covers K then V of one page in one layer and is seeded with the page's identity (see ``PoolHandle``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash


@dataclass(frozen=True, slots=True, eq=False)
class RowChecks:
    """``expected`` uint64 [pages, layers of the move], ``identities`` uint8 [pages, 16], ``wanted`` bool [pages].

    ``wanted`` are the pages to be checked at all.
    """

    expected: npt.NDArray[np.uint64]
    identities: npt.NDArray[np.uint8]
    wanted: npt.NDArray[np.bool_]

    def seeds(self) -> npt.NDArray[np.uint64]:
        """Return the low 8 bytes of each identity, uint64 [pages]."""
        return np.ascontiguousarray(self.identities[:, :8]).view("<u8").reshape(-1)

    def part(self, pages: slice, layers: slice = slice(None)) -> RowChecks:
        """Return the checks of some of the pages and layers."""
        return RowChecks(self.expected[pages, layers], self.identities[pages], self.wanted[pages])

    def of(self, entries: npt.NDArray[np.intp]) -> RowChecks:
        """Return the checks of these entries alone."""
        return RowChecks(self.expected[entries], self.identities[entries], self.wanted[entries])

    def holds(self, row: npt.NDArray[np.uint8], page: int, layer: int) -> bool:
        """Return whether a row has the checksum of entry ``page`` in entry ``layer``.

        ``row`` is contiguous uint8 [2 * half_bytes].
        """
        if not self.wanted[page]:
            return True
        seed = int.from_bytes(self.identities[page, :8].tobytes(), "little")
        return int(xxhash.xxh3_64_intdigest(row.data, seed=seed)) == int(self.expected[page, layer])
