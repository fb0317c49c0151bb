"""Pieces: up to 64 consecutive tokens of one sequence, unit by unit.

A unit is a layer's hidden states, its K or its V. :class:`PieceRows` is what saving assembles; :class:`HiddenPiece` is
what a store of hidden states alone keeps of it.

Layers lie one behind the other, so one layer of a piece is one contiguous read, which is the order of restoration
(HCache section 4.2.1). Pieces end at multiples of 64 tokens from the root, where chunks of KV end too; a sequence's
first and last piece may be shorter. Each layer has a checksum of its own, seeded with where it belongs, so that a
layer can be verified alone and a layer or piece in another's place never verifies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from services.worker.restore.refusals import PiecesRefused
from shared.chunks import CHUNK_TOKENS

_LAYER_BITS = 16


def piece_end(position: int, piece_tokens: int = CHUNK_TOKENS) -> int:
    """Return the largest possible end (exclusive) of the piece that holds the token at ``position``."""
    return (position // piece_tokens + 1) * piece_tokens


@dataclass(frozen=True, slots=True, eq=False)
class PieceRows:
    """Rows of one piece, uint8 [units, tokens, row_bytes], of tokens from ``first`` on.

    The memory is used again for the next piece: a reader that keeps it copies it.
    """

    sequence_id: str
    first: int
    rows: npt.NDArray[np.uint8]

    @property
    def tokens(self) -> int:
        """Number of tokens in the piece."""
        return self.rows.shape[1]


class PieceTaker(Protocol):
    """Receiver of pieces. Called by the saving thread alone."""

    def take(self, piece: PieceRows) -> bool:
        """Take rows; return False when there is no room: the rest of the sequence is not saved."""

    def end(self, sequence_id: str) -> None:
        """End a sequence: no further piece of it comes. Called once for each that has begun."""


@dataclass(frozen=True, slots=True, eq=False)
class HiddenPiece:
    """Hidden states of tokens ``[first, end)`` of one sequence. It is not changed once it is made.

    rows: uint8 [len(layers), tokens, row_bytes]; ``layers`` are the model's layers that it holds, ascending; checksums:
    uint64 [len(layers)].
    """

    sequence_id: str
    first: int
    layers: tuple[int, ...]
    rows: npt.NDArray[np.uint8]
    checksums: npt.NDArray[np.uint64]

    @classmethod
    def seal(cls, sequence_id: str, first: int, layers: tuple[int, ...], rows: npt.NDArray[np.uint8]) -> HiddenPiece:
        """Seal a piece of these rows, contiguous in each layer, with their checksums."""
        sums = [_checksum(rows[index], first, layer) for index, layer in enumerate(layers)]
        return cls(sequence_id, first, layers, rows, np.array(sums, dtype=np.uint64))

    @property
    def tokens(self) -> int:
        """Number of tokens in the piece."""
        return self.rows.shape[1]

    @property
    def end(self) -> int:
        """Position behind the last token."""
        return self.first + self.tokens

    @property
    def nbytes(self) -> int:
        """Bytes of its hidden states, without checksums."""
        return self.rows.nbytes

    def layer_rows(self, layer: int) -> npt.NDArray[np.uint8]:
        """Return one layer's rows, uint8 [tokens, row_bytes], verified.

        Raises PiecesRefused for missing or altered ones.
        """
        if layer not in self.layers:
            raise PiecesRefused(f"the piece at token {self.first} lacks layer {layer}")
        index = self.layers.index(layer)
        rows = self.rows[index]
        if _checksum(rows, self.first, layer) != int(self.checksums[index]):
            raise PiecesRefused(f"layer {layer} of the piece at token {self.first} is not what was saved")
        return rows


def _checksum(rows: npt.NDArray[np.uint8], first: int, layer: int) -> int:
    return int(xxhash.xxh3_64_intdigest(rows.data, seed=first << _LAYER_BITS | layer))
