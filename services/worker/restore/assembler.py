"""Turns rows as steps bring them into pieces as storage keeps them (HCache section 4.2.2, stage two). Pure.

Steps bring a few rows of many sequences, all layers of a token at once; a piece wants 64 tokens of one sequence, one
layer behind the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.worker.restore.pieces import HiddenPiece, piece_end
from shared.errors import InvariantViolated


@dataclass(slots=True)
class _Open:
    """The piece of one sequence that is being filled: ``rows`` uint8 [layers, capacity, row_bytes], ``filled``
    tokens.
    """

    first: int
    rows: npt.NDArray[np.uint8] | None = None
    filled: int = 0


class PieceAssembler:
    """At most one piece per sequence is open, so memory is bounded by the number of sequences."""

    def __init__(self, layers: tuple[int, ...], row_bytes: int) -> None:
        self._layers, self._row_bytes = layers, row_bytes
        self._open: dict[str, _Open] = {}

    def begin(self, sequence_id: str, position: int) -> None:
        """The sequence's rows come from ``position`` on. Raises InvariantViolated if it has begun."""
        if sequence_id in self._open:
            raise InvariantViolated(f"hidden states of {sequence_id} are being assembled already")
        self._open[sequence_id] = _Open(position)

    def append(self, sequence_id: str, rows: npt.NDArray[np.uint8]) -> Iterator[HiddenPiece]:
        """The sequence's next rows, uint8 [layers, N, row_bytes]; yields the pieces that they fill."""
        start, total = 0, rows.shape[1]
        while start < total:
            piece = self._open[sequence_id]
            capacity = piece_end(piece.first) - piece.first
            if piece.rows is None:
                piece.rows = np.empty((len(self._layers), capacity, self._row_bytes), dtype=np.uint8)
            count = min(capacity - piece.filled, total - start)
            piece.rows[:, piece.filled : piece.filled + count] = rows[:, start : start + count]
            piece.filled += count
            start += count
            if piece.filled == capacity:
                self._open[sequence_id] = _Open(piece.first + capacity)
                yield HiddenPiece.seal(sequence_id, piece.first, self._layers, piece.rows)

    def end(self, sequence_id: str) -> HiddenPiece | None:
        """Forget the sequence; the tail of it that fills no piece, or None if nothing is left."""
        piece = self._open.pop(sequence_id)
        if piece.rows is None:
            return None
        rows = piece.rows[:, : piece.filled].copy()  # Gives back what the piece does not use.
        return HiddenPiece.seal(sequence_id, piece.first, self._layers, rows)

    @property
    def sequences(self) -> int:
        """How many have begun and not ended."""
        return len(self._open)
