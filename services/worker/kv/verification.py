"""The choice of host pages that are checked before use, and the risk of checking fewer.

``always`` checks every byte against the storage's checksums. ``sampled`` and ``never`` check the identity table, which
tells whether a page still holds the plan's content, before and after the copy; ``sampled`` checks the bytes of some
pages too, drawn by their identity and the order's number, so that the same run draws the same pages and every page is
drawn sooner or later. After any failure everything from that storage is checked until its pool is mapped again.

Without checksums a flipped bit in memory that the machine's own error correction has missed stays undetected.
``bench/results/transfers.json`` has the cost of each mode.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

Verify = Literal["always", "sampled", "never"]

_MIX = np.uint64(0x9E3779B97F4A7C15)


class Verification:
    """The setting, and failures by storage. Used by the compute and the transfer thread."""

    def __init__(self, mode: Verify = "always", share: float = 0.1) -> None:
        """Prepare; ``share`` of the pages is drawn when ``mode`` is ``sampled``."""
        self.mode = mode
        self._share = share
        self._orders = 0
        self._distrusted: set[str] = set()

    def draw(self, identities: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """Return which pages of the next order to check, bool [pages]; ``identities`` uint8 [pages, 16]."""
        self._orders += 1
        count = len(identities)
        if self.mode != "sampled":
            return np.full(count, self.mode == "always")
        words = np.ascontiguousarray(identities).view("<u8").reshape(count, 2)
        # The other half of an identity seeds checksums. Overflow is a part of the mixing.
        with np.errstate(over="ignore"):
            mixed = (words[:, 1] ^ (np.uint64(self._orders) * _MIX)) * _MIX
            mixed = (mixed ^ (mixed >> np.uint64(32))) * _MIX
        return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53 < self._share

    def distrusts(self, storage_id: str) -> bool:
        """Return whether every page of this storage is to be checked, whatever was drawn."""
        return storage_id in self._distrusted

    def note_failure(self, storage_id: str) -> None:
        """Note a wrong page of this storage: all its pages are checked from now on."""
        self._distrusted.add(storage_id)

    def trust_again(self, storage_id: str) -> None:
        """End the checks of all pages of this storage, whose pool was mapped again."""
        self._distrusted.discard(storage_id)
