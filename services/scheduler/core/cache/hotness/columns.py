"""Numbers of the hotness filter: how digests are mixed, and columns of numbers of 1 to 64 bits.

splitmix64 spreads a digest over all of its 64 bits, one at a time or a vector of them: digests are polynomials modulo
2**64, so their low bits depend on the low bits of the tokens only.

Columns are bytearrays, each number in 1, 2, 4 or 8 bytes, because a snapshot holds them as they are, and because in
them a single read (for one byte) and the search for a value in a few places cost less than in a numpy array; whole
columns are seen as vectors.
"""

from __future__ import annotations

import numpy as np
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


SIZES = tuple(next(size for size in (1, 2, 4, 8) if bits <= 8 * size) for bits in range(65))
"""Bytes of a value of so many bits."""

Vector = NDArray[np.unsignedinteger]

_TYPES = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}


def read(column: bytearray, bits: int, slot: int) -> int:
    """One value."""
    if bits <= 8:
        return column[slot]
    size = SIZES[bits]
    return int.from_bytes(column[slot * size : (slot + 1) * size], "little")


def store(column: bytearray, bits: int, slot: int, value: int) -> None:
    """Write a value; one that is too large for its bits is written as the largest."""
    value = min(value, (1 << bits) - 1)
    if bits <= 8:
        column[slot] = value
    else:
        size = SIZES[bits]
        column[slot * size : (slot + 1) * size] = value.to_bytes(size, "little")


def vector(column: bytearray, bits: int) -> Vector:
    """The whole column; changes go through."""
    values: Vector = np.frombuffer(column, dtype=_TYPES[SIZES[bits]])
    return values


def parted(column: bytearray, bits: int, goes_up: NDArray[np.bool_]) -> bytearray:
    """A column of twice the length: each value in the lower or the upper half, and 0 in the other."""
    doubled = bytearray(2 * len(column))
    values, halves = vector(column, bits), vector(doubled, bits).reshape(2, -1)
    halves[0] = np.where(goes_up, 0, values)
    halves[1] = np.where(goes_up, values, 0)
    return doubled
