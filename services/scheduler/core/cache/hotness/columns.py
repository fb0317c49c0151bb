"""Columns of the hotness filter: numbers of 1 to 64 bits, one after another, in 1, 2, 4 or 8 bytes each.

Bytearrays, because a snapshot holds them as they are, and because in them a single read (for one byte) and the
search for a value in a few places cost less than in a numpy array; whole columns are seen as vectors.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
