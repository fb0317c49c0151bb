"""A store of hidden states alone, for what saves state of any form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.worker.restore.pieces import HiddenPiece, PieceRows


class HiddenPieceTaker(Protocol):
    """A store of hidden states."""

    def take(self, piece: HiddenPiece) -> bool:
        """False when there is no room for it."""


class HiddenPieces:
    """A :class:`PieceTaker` that makes sealed pieces of hidden states of ``layers``, tails too."""

    def __init__(self, taker: HiddenPieceTaker, layers: Sequence[int]) -> None:
        self._taker, self._layers = taker, tuple(layers)

    def take(self, piece: PieceRows) -> bool:
        return self._taker.take(HiddenPiece.seal(piece.sequence_id, piece.first, self._layers, piece.rows.copy()))

    def end(self, sequence_id: str) -> None:
        """A piece says by itself which tokens it holds."""
