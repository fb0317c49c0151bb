"""splitmix64: spreads a digest over all of its 64 bits, one at a time or a vector of them.

Digests are polynomials modulo 2**64: their low bits depend on the low bits of the tokens only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

MULTIPLIER = 0x9E3779B97F4A7C15
_SECOND = 0xBF58476D1CE4E5B9
_THIRD = 0x94D049BB133111EB
_MASK = 2**64 - 1


def mix(value: int) -> int:
    """A 64-bit number that looks unrelated to ``value``; a permutation."""
    value = (value + MULTIPLIER) & _MASK
    value = ((value ^ (value >> 30)) * _SECOND) & _MASK
    value = ((value ^ (value >> 27)) * _THIRD) & _MASK
    return value ^ (value >> 31)


def mix_all(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """:func:`mix` of each."""
    values = values + np.uint64(MULTIPLIER)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_SECOND)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_THIRD)
    return values ^ (values >> np.uint64(31))
