"""A count-min sketch of how often each digest was seen lately, of fixed size, halved from time to time."""

from __future__ import annotations

import msgspec
import numpy as np

# Odd numbers with scattered bits, one for each row: the high bits of the product pick the counter.
_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
_MASK = 2**64 - 1
_MOST_SEEN = 15  # As in the paper, where a counter has four bits.
_LEAST_BITS, _MOST_BITS = 8, 18  # Counters of a row, as a power of two.

Places = tuple[int, int, int, int]
"""Indices of a digest's counters, one in each row."""


class FrequencySketch(msgspec.Struct):
    """Four rows of counters (TinyLFU: Einziger, Friedman and Manes 2017, sections 3.3 and 3.4)."""

    bits: int = 0
    counters: bytearray = bytearray()  # Row after row, a byte each.
    seen: int = 0  # Digests counted since the counters were halved, plus half of those before.

    def count(self, digest: int, sample: int) -> None:
        """Count a digest once more; all counters are halved after every ``sample`` counts."""
        places = self._places(digest)
        self._raise(places, min(_MOST_SEEN, self._least(places) + 1))
        self.seen += 1
        if self.seen >= sample:
            self.counters[:] = (np.frombuffer(self.counters, dtype=np.uint8) >> 1).tobytes()
            self.seen //= 2

    def raise_to(self, digest: int, seen: int) -> None:
        """Let the digest count as seen at least ``seen`` times."""
        self._raise(self._places(digest), seen)

    def estimate(self, digest: int) -> int:
        """Return how often the digest was seen lately: never less than the true count, at most 15."""
        return self._least(self._places(digest))

    def _least(self, places: Places) -> int:
        first, second, third, fourth = places
        counters = self.counters
        return min(counters[first], counters[second], counters[third], counters[fourth])

    def _raise(self, places: Places, seen: int) -> None:
        for place in places:
            # Counters that are higher stay: they are too high already, because they are shared.
            if self.counters[place] < seen:
                self.counters[place] = seen

    def _places(self, digest: int) -> Places:
        shift, width = 64 - self.bits, 1 << self.bits
        first, second, third, fourth = _MULTIPLIERS
        return (
            (digest * first & _MASK) >> shift,
            ((digest * second & _MASK) >> shift) + width,
            ((digest * third & _MASK) >> shift) + 2 * width,
            ((digest * fourth & _MASK) >> shift) + 3 * width,
        )


def make_sketch(entries: int) -> FrequencySketch:
    """Return an empty sketch for about ``entries`` digests at a time; 1 KiB to 1 MiB."""
    bits = min(_MOST_BITS, max(_LEAST_BITS, (max(1, entries) - 1).bit_length()))
    return FrequencySketch(bits=bits, counters=bytearray(4 << bits))
