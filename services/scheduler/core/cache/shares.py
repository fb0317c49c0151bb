"""Measured importance of chunks that were read in part, and the worth of nodes by it (IMPRESS 4.4.2).

IMPRESS scores a chunk by its frequency times the share of its tokens that are important, and keeps the best scores.
Here one value decides what stays: it already includes how soon a node is used again, what it costs to restore and its
size (:mod:`eviction.thermocline`; hotness for admission), and it is multiplied by the node's ``importance``:

    the average share of the node's chunks / the average share of all chunks read in part, from 1/4 to 4

Shares are about as large as the ratio that requests ask for, so it is by their relation that they tell chunks apart,
and an unknown node counts as one of average importance: 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable


MOST_CHUNKS = 65_536
"""Chunks of a storage with remembered shares at most; those read longest ago are forgotten first."""

LEAST_IMPORTANCE, MOST_IMPORTANCE = 0.25, 4.0

NEUTRAL = 1.0
_WEIGHT = 0.25
"""Weight of a further read in the moving average."""


class ChunkShare(msgspec.Struct, array_like=True, gc=False):
    """The share of a chunk's tokens that was chosen, as a moving average, and its number of reads."""

    average: float
    reads: int = 1


class ChunkShares(msgspec.Struct):
    """Shares by name of the chunk, the one read longest ago first. ``total`` is the sum of all averages."""

    by_name: dict[bytes, ChunkShare] = {}
    total: float = 0.0

    def note(self, names: Iterable[bytes], chosen: bytes) -> None:
        """Note a read of these chunks; ``chosen`` has a byte for each, the chosen share of its tokens in 255ths."""
        for name, share in zip(names, chosen, strict=True):
            known = self.by_name.pop(name, None)
            if known is None:
                known = ChunkShare(share / 255)
            else:
                self.total -= known.average
                known = ChunkShare(known.average + _WEIGHT * (share / 255 - known.average), known.reads + 1)
            self.total += known.average
            self.by_name[name] = known
        while len(self.by_name) > MOST_CHUNKS:
            self.total -= self.by_name.pop(next(iter(self.by_name))).average

    def importance_of(self, names: Iterable[bytes]) -> float:
        """Return the worth of these chunks' tokens relative to others; 1 where nothing is known. Changes nothing."""
        known = [self.by_name[name].average for name in names if name in self.by_name]
        if not known or self.total <= 0:
            return NEUTRAL
        relation = sum(known) / len(known) * len(self.by_name) / self.total
        return min(MOST_IMPORTANCE, max(LEAST_IMPORTANCE, relation))
