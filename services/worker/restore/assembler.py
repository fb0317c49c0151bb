"""Assembly of rows, as steps bring them, into pieces as storage keeps them (HCache section 4.2.2, stage two). Pure.

Steps bring a few rows of many sequences, all units of a token at once; a piece has 64 tokens of one sequence, one unit
behind the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.worker.restore.pieces import PieceRows, piece_end
from shared.chunks import CHUNK_TOKENS
from shared.errors import InvariantViolated


@dataclass(slots=True)
class _Open:
    """The piece of one sequence that is being filled.

    ``rows`` uint8 [units, piece_tokens, row_bytes] with ``filled`` tokens; None until the first comes.
    """

    first: int
    rows: npt.NDArray[np.uint8] | None = None
    filled: int = 0


class PieceAssembler:
    """At most one piece per sequence is open, so memory is bounded by the number of sequences.

    It is reused for later ones: filling new memory costs far more.
    """

    def __init__(self, units: int, row_bytes: int, piece_tokens: int = CHUNK_TOKENS) -> None:
        """Begin without sequences; a whole piece is uint8 [units, piece_tokens, row_bytes].

        Pieces end at multiples of ``piece_tokens`` tokens from the root, or where their sequence ends.
        """
        self._shape = (units, piece_tokens, row_bytes)
        self._open: dict[str, _Open] = {}
        self._spare: list[npt.NDArray[np.uint8]] = []

    def begin(self, sequence_id: str, position: int) -> None:
        """Begin the sequence's rows at ``position``. Raises InvariantViolated if it has begun."""
        if sequence_id in self._open:
            raise InvariantViolated(f"rows of {sequence_id} are being assembled already")
        self._open[sequence_id] = _Open(position)

    def append(self, sequence_id: str, rows: npt.NDArray[np.uint8]) -> Iterator[PieceRows]:
        """Append the sequence's next rows, uint8 [units, N, row_bytes]; yield the pieces that they fill.

        Each piece must be used before the next is asked for.
        """
        piece = self._open[sequence_id]
        start, total = 0, rows.shape[1]
        while start < total:
            capacity = piece_end(piece.first, self._shape[1]) - piece.first
            if piece.rows is None:
                piece.rows = self._spare.pop() if self._spare else np.empty(self._shape, dtype=np.uint8)
            count = min(capacity - piece.filled, total - start)
            piece.rows[:, piece.filled : piece.filled + count] = rows[:, start : start + count]
            piece.filled += count
            start += count
            if piece.filled == capacity:
                yield PieceRows(sequence_id, piece.first, piece.rows[:, :capacity])
                piece.first, piece.filled = piece.first + capacity, 0

    def end(self, sequence_id: str) -> PieceRows | None:
        """Forget the sequence; return its tail that fills no piece, or None if nothing is left."""
        piece = self._open.pop(sequence_id)
        if piece.rows is None:
            return None
        self._spare.append(piece.rows)
        return PieceRows(sequence_id, piece.first, piece.rows[:, : piece.filled]) if piece.filled else None
