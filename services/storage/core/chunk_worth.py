"""The worth of a chunk on the disk: its uses; each halves within :data:`HALF_LIFE_S`.

A chunk's hotness, as the scheduler gives it with the save, counts as its first uses, on a logarithmic scale: hotness of
a prefix grows without a bound, and a chunk that was hot once must not stay forever. All chunks fade alike, so the
logarithm of a worth, taken at one common time, is a number that changes only by a use: its **heat**. Code that orders
chunks by it need not look at them again as time goes by.
"""

from __future__ import annotations

from math import isfinite, log2

HALF_LIFE_S = 3600.0


def first_heat(value: float, now_s: float) -> float:
    """Return the heat of a chunk of this hotness that is saved now; no hotness counts as one use."""
    hotness = min(value, 1e300) if isfinite(value) and value > 0 else 0.0
    return log2(1 + log2(1 + hotness)) + now_s / HALF_LIFE_S


def heat_left(heat: float, now_s: float) -> float:
    """Return the logarithm of a heat's present worth: a number without a clock, which can be stored."""
    return heat - now_s / HALF_LIFE_S


def heat_again(left: float, now_s: float) -> float:
    """Return the heat for a stored worth. Time in which the chunk could not be used does not count."""
    return left + now_s / HALF_LIFE_S


def heat_after_use(heat: float, now_s: float) -> float:
    """Return the heat after one more use: the logarithm of a sum, by its greater part so that nothing overflows."""
    use = now_s / HALF_LIFE_S
    return max(heat, use) + log2(1 + 2.0 ** -min(abs(heat - use), 1000.0))
