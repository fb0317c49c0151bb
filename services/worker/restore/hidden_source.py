"""Sources of the hidden states of a prefix, read layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from services.worker.restore.hidden_shape import HiddenShape
from services.worker.restore.pieces import HiddenPiece
from services.worker.restore.refusals import PiecesRefused


class HiddenSource(Protocol):
    """Hidden states of a run of tokens. Used by one thread."""

    tokens: int

    def read(self, layer: int, start: int, end: int, into: torch.Tensor) -> None:
        """Copy one layer's hidden states of tokens ``[start, end)`` to ``into`` [end - start, hidden].

        Tokens are counted from the first. On a GPU the copy is launched on the current stream. Raises PiecesRefused for
        data that cannot be trusted; ``into`` is then undefined.
        """


class PieceSource:
    """Pieces in host memory. They stay unchanged until the restoration has ended."""

    def __init__(
        self, shape: HiddenShape, pieces: Sequence[HiddenPiece], first: int, end: int, layers: Sequence[int]
    ) -> None:
        """Prepare to read tokens ``[first, end)`` of one sequence. Pieces may overlap and lie in any order.

        Raises PiecesRefused when they have a gap, belong to several sequences, lack a layer or have another shape.
        """
        self.tokens = end - first
        self._first = first
        self._dtype = shape.torch_dtype
        if len({piece.sequence_id for piece in pieces}) > 1:
            raise PiecesRefused("pieces of several sequences make no prefix")
        for piece in pieces:
            _check(piece, shape, layers)
        self._parts = list(_cover(pieces, first, end))

    def read(self, layer: int, start: int, end: int, into: torch.Tensor) -> None:
        """Copy the rows from each piece that covers a part of ``[start, end)``; verify the layer of each."""
        begin, stop = self._first + start, self._first + end
        for piece, piece_start, piece_stop in self._parts:
            low, high = max(begin, piece_start), min(stop, piece_stop)
            if low >= high:
                continue
            rows = piece.layer_rows(layer)[low - piece.first : high - piece.first]
            # Read-only memory will do: nothing is written to it.
            source = torch.frombuffer(np.ascontiguousarray(rows).data, dtype=self._dtype)
            into[low - begin : high - begin].copy_(source.view(high - low, -1), non_blocking=True)


def _check(piece: HiddenPiece, shape: HiddenShape, layers: Sequence[int]) -> None:
    expected = (len(piece.layers), piece.tokens, shape.row_bytes)
    if piece.rows.dtype != np.uint8 or piece.rows.shape != expected or piece.checksums.shape != expected[:1]:
        raise PiecesRefused(f"the piece at token {piece.first} has shape {piece.rows.shape}, not {expected}")
    missing = [layer for layer in layers if layer not in piece.layers]
    if missing:
        raise PiecesRefused(f"the piece at token {piece.first} lacks layers {missing}")


def _cover(pieces: Sequence[HiddenPiece], first: int, end: int) -> list[tuple[HiddenPiece, int, int]]:
    """Return which piece gives which tokens: from each position on, the one that reaches furthest."""
    parts: list[tuple[HiddenPiece, int, int]] = []
    position = first
    while position < end:
        usable = [piece for piece in pieces if piece.first <= position < piece.end]
        if not usable:
            raise PiecesRefused(f"no piece holds the hidden states of token {position}")
        furthest = max(usable, key=lambda piece: piece.end)
        parts.append((furthest, position, min(end, furthest.end)))
        position = parts[-1][2]
    return parts
