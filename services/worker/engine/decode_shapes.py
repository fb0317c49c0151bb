"""The sizes of decode steps for which a CUDA graph is captured, and the choice of one for a step. Arithmetic only.

A graph computes as many rows as it was captured with, over contexts up to a length that sizes the grid of its attention
kernels. Both are rounded up: rows because few sizes have to serve all batches, lengths because a grid for the longest
context has programs that end at once where contexts are short. Neither rounding changes the result of a row: how a row
is split depends only on its own keys (``services.worker.kernels.decode``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LENGTHS = (512, 2048, 8192)
"""Tokens. The decode kernel cuts a row into splits of 512 keys, so these are grids of 1, 4 and 16 splits; longer
contexts have the grid of 32, which serves any length.
"""


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """A step of ``rows`` requests, none longer than ``length`` tokens after it.

    ``shares``: it attends in a launch of its own to keys that requests share, for which other shapes have no launch.
    """

    rows: int
    length: int
    shares: bool = False

    def fits(self, rows: int, length: int) -> bool:
        """Return whether a step of ``rows`` requests of up to ``length`` tokens fits into this shape."""
        return rows <= self.rows and length <= self.length


def row_counts(most_rows: int) -> list[int]:
    """Return the numbers of rows to capture, ascending; the last is ``most_rows``.

    They are 1, 2, 4, then numbers in steps of 8 to 32, of 16 to 64, and of a quarter of the last power of two.
    """
    counts, rows = [], 1
    while rows < most_rows:
        counts.append(rows)
        rows += rows if rows < 8 else 8 if rows < 32 else 16 if rows < 64 else 1 << (rows.bit_length() - 3)
    return [*counts, most_rows]


def decode_shapes(most_rows: int, longest: int) -> list[DecodeShape]:
    """Return all shapes to capture for steps of up to ``most_rows`` requests of up to ``longest`` tokens.

    The largest is first: the others then find the memory that they need in that of the first.
    """
    lengths = [length for length in LENGTHS if length < longest] + [longest]
    return [DecodeShape(rows, length) for rows in reversed(row_counts(most_rows)) for length in reversed(lengths)]


def smallest(shapes: Iterable[DecodeShape], rows: int, length: int) -> DecodeShape | None:
    """Return the shape of the fewest rows, and then of the least length, that serves such a step; None if none does."""
    fitting = (shape for shape in shapes if shape.fits(rows, length))
    return min(fitting, key=lambda shape: (shape.rows, shape.length), default=None)
