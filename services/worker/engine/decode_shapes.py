"""For which sizes of a decode step a CUDA graph is captured, and which of them serves a step. Arithmetic only.

A graph computes as many rows as it was captured with, over contexts up to a length that sizes the grid of its attention
kernels. Both are rounded up: rows because few sizes have to serve all batches, lengths because a grid for the longest
context has programs that end at once where contexts are short. Neither rounding changes what a row comes to: how a row
is cut depends on nothing but its own keys (``services.worker.kernels.decode``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LENGTHS = (512, 2048, 8192)
"""Tokens. The decode kernel cuts a row into splits of 512 keys, so these are grids of 1, 4 and 16 splits; what is
longer has the grid of 32, which serves any length.
"""


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """A step of ``rows`` requests, none longer than ``length`` tokens after it. ``shares``: it attends in a launch of
    its own to what requests share, where other shapes would do so in none.
    """

    rows: int
    length: int
    shares: bool = False

    def fits(self, rows: int, length: int) -> bool:
        return rows <= self.rows and length <= self.length


def row_counts(most_rows: int) -> list[int]:
    """1, 2, 4, then steps of 8 to 32, of 16 to 64, and of a quarter of the last power of two; the last is the most."""
    counts, rows = [], 1
    while rows < most_rows:
        counts.append(rows)
        rows += rows if rows < 8 else 8 if rows < 32 else 16 if rows < 64 else 1 << (rows.bit_length() - 3)
    return [*counts, most_rows]


def decode_shapes(most_rows: int, longest: int) -> list[DecodeShape]:
    """All that are captured for steps of up to ``most_rows`` requests of up to ``longest`` tokens, the largest first:
    what the others need of memory then lies in what the first has.
    """
    lengths = [length for length in LENGTHS if length < longest] + [longest]
    return [DecodeShape(rows, length) for rows in reversed(row_counts(most_rows)) for length in reversed(lengths)]


def smallest(shapes: Iterable[DecodeShape], rows: int, length: int) -> DecodeShape | None:
    """Return the shape of the fewest rows, and then of the least length, that serves such a step; None if none does."""
    fitting = (shape for shape in shapes if shape.fits(rows, length))
    return min(fitting, key=lambda shape: (shape.rows, shape.length), default=None)
