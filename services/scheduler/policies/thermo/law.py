"""The law of reuse: how likely a prefix is to be used again, by its age and its features.

Reuse is a point process. Its hazard (reuses a second of a prefix of age ``a``, given that it was not reused yet) is
taken as a product, ``hazard(a) = base[rhythm][age bin] * factor_1 * ... * factor_n``: one shape over age for each
rhythm (the smoothed time between the last uses, and how long the answer was, for long answers are read for longer) and
one factor for each other feature. That is a piecewise exponential model, fitted by alternating ratios of observed to
expected reuses over a sliding window of sampled accesses (see :mod:`thermo.fit`). A sample goes on when its prefix is
evicted, and one that has not ended counts with the time that it was watched, so the estimate is not biased by what the
cache keeps.

The value of holding a token is its Gittins index: the most reuses per second of occupancy that any future stopping time
gives. It is the hazard itself where the hazard falls with age (recency is right), and looks ahead where it rises (think
times, cyclic scans: the oldest is the next to come back, so that the newest goes first).
"""

from __future__ import annotations

from math import log2
from struct import Struct

import msgspec
import numpy as np

from services.scheduler.policies.thermo.samples import Floats, Ints, Samples

FEATURE_BITS = 5
PACES = 1 << FEATURE_BITS  # Values of the pace, and of any other feature.
ANSWER_BITS = 2
ANSWERS = 1 << ANSWER_BITS
RHYTHM_BITS = FEATURE_BITS + ANSWER_BITS  # The pace, and above it the class of the answer.
RHYTHMS = 1 << RHYTHM_BITS
FEATURES = 9  # The rhythm and eight features with factors.
PASSED_SHIFT = RHYTHM_BITS + FEATURE_BITS * (FEATURES - 2)  # Where the last feature begins.
COUNT_SHIFT = RHYTHM_BITS + FEATURE_BITS * (FEATURES - 1)  # Where the number of uses begins, above the features.
PAIRS = (FEATURES - 1) // 2  # Features are looked up two at a time.
PAIR_SIZE = PACES * PACES
AGE_BINS = 32
EDGES = AGE_BINS + 1
BINS_PER_DOUBLING = 3
LEVELS = 33  # Levels of the product of factors, half a doubling apart, the middle one being 1.
MIDDLE = LEVELS // 2

_FLOAT = Struct("<d")
_FLOATS = Struct("<dd")
_NEAR_FAR = Struct("<ff")
_SINGLE = Struct("<f")
_FIRST_EDGE = 2 ** (1 / BINS_PER_DOUBLING) - 1


def pack(features: tuple[int, ...]) -> int:
    """Return the code of a tuple of ``FEATURES`` small numbers, the rhythm first; too large ones are clipped."""
    code = min(features[0], RHYTHMS - 1)
    for index in range(1, len(features)):
        code |= min(features[index], PACES - 1) << shift_of(index)
    return code


def shift_of(feature: int) -> int:
    """Return the bit of a code at which a feature begins, by its number from 1 on (0 is the rhythm)."""
    return RHYTHM_BITS + FEATURE_BITS * (feature - 1)


class Law(msgspec.Struct):
    """The samples, and the tables of the last fit; no tables are in force before the first.

    Scores and tables are rounded to single precision: machines (and the two ways to compute a score) differ in the last
    bits of a double. The order of two equal prefixes must not depend on that, or a replay elsewhere would differ.
    """

    samples: Samples = msgspec.field(default_factory=Samples)
    factors: bytes = b""  # FEATURES x PACES, float64; row 0 is not used.
    levels: bytes = b""  # PAIRS x PAIR_SIZE, float64: the sum that two features together add to the level.
    edges: bytes = b""  # EDGES ages, float64.
    rows: bytes = b""  # RHYTHMS bytes: the rhythm's row in ``index``.
    index: bytes = b""  # Rows x LEVELS x EDGES, float32: the Gittins index at the edges.

    def score(self, ages: Floats, codes: Ints) -> Floats:
        """Return expected reuses per second of occupancy (float64) of prefixes of these ages (s) and codes.

        Before the first fit it is 1 / (1 + age).
        """
        if not self.index:
            return rounded(1.0 / (1.0 + np.maximum(ages, 0.0)))  # Nothing was learned yet: recency.
        level = np.clip(self.level(codes), 0, LEVELS - 1.001)
        edges = np.frombuffer(self.edges)
        index = np.frombuffer(self.index, np.float32)
        age_bin = np.clip(np.searchsorted(edges, ages, side="right") - 1, 0, AGE_BINS - 1)
        part = np.clip((ages - edges[age_bin]) / np.diff(edges)[age_bin], 0.0, 1.0)
        low = level.astype(np.int64)
        above = level - low
        rows = np.frombuffer(self.rows, np.uint8).astype(np.int64)
        place = (rows[codes & (RHYTHMS - 1)] * LEVELS + low) * EDGES + age_bin
        at_low = (1 - part) * index[place] + part * index[place + 1]
        at_high = (1 - part) * index[place + EDGES] + part * index[place + EDGES + 1]
        return rounded((1 - above) * at_low + above * at_high)

    def level(self, codes: Ints) -> Floats:
        """Return the level (float64) of each code's product of factors, not limited to the levels of the tables."""
        levels = np.frombuffer(self.levels)
        total = np.full(len(codes), float(MIDDLE))
        for pair in range(PAIRS):
            value = (codes >> (RHYTHM_BITS + 2 * FEATURE_BITS * pair)) & (PAIR_SIZE - 1)
            total += levels[pair * PAIR_SIZE : (pair + 1) * PAIR_SIZE][value]
        return total

    def score_one(self, age: float, code: int) -> float:
        """Return the same as :meth:`score` for one prefix, without the cost of arrays."""
        if not self.index:
            return rounded_one(1.0 / (1.0 + max(age, 0.0)))
        level = float(MIDDLE)
        for pair in range(PAIRS):
            value = (code >> (RHYTHM_BITS + 2 * FEATURE_BITS * pair)) & (PAIR_SIZE - 1)
            level += _FLOAT.unpack_from(self.levels, 8 * (pair * PAIR_SIZE + value))[0]
        level = min(max(level, 0.0), LEVELS - 1.001)
        unit = _FLOAT.unpack_from(self.edges, 8)[0] / _FIRST_EDGE
        age_bin = min(max(int(BINS_PER_DOUBLING * log2(1 + max(age, 0.0) / unit)), 0), AGE_BINS - 1)
        lower, upper = _FLOATS.unpack_from(self.edges, 8 * age_bin)
        part = min(max((age - lower) / (upper - lower), 0.0), 1.0)
        low = int(level)
        place = (self.rows[code & (RHYTHMS - 1)] * LEVELS + low) * EDGES + age_bin
        near, far = _NEAR_FAR.unpack_from(self.index, 4 * place)
        at_low = (1 - part) * near + part * far
        near, far = _NEAR_FAR.unpack_from(self.index, 4 * (place + EDGES))
        above = level - low
        return rounded_one((1 - above) * at_low + above * ((1 - part) * near + part * far))


def rounded(values: Floats) -> Floats:
    """Return the values rounded to single precision, as float64."""
    return values.astype(np.float32).astype(np.float64)


def rounded_one(value: float) -> float:
    """Return one value rounded to single precision."""
    number: float = _SINGLE.unpack(_SINGLE.pack(value))[0]
    return number
