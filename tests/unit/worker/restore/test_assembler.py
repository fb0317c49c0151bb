"""Rows become pieces of 64 tokens at absolute positions, however they come."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.restore.assembler import PieceAssembler
from services.worker.restore.pieces import HiddenPiece, PieceRows
from services.worker.restore.refusals import PiecesRefused
from shared.errors import InvariantViolated

LAYERS, ROW_BYTES = (0, 2, 5), 4


def rows_of(number: int, first: int, count: int) -> np.ndarray:
    """Rows that tell sequence, layer and position."""
    position = np.arange(first, first + count)
    rows = np.zeros((len(LAYERS), count, ROW_BYTES), dtype=np.uint8)
    rows[:, :, 0] = number
    rows[:, :, 1] = np.array(LAYERS)[:, None]
    rows[:, :, 2], rows[:, :, 3] = position % 256, position // 256
    return rows


def sealed(piece: PieceRows) -> HiddenPiece:
    """A copy: the assembler uses the memory again."""
    return HiddenPiece.seal(piece.sequence_id, piece.first, LAYERS, piece.rows.copy())


@given(
    st.lists(st.integers(0, 200), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 150)), max_size=25),
    st.sampled_from([64, 192]),
)
def test_pieces_are_the_rows(starts: list[int], steps: list[tuple[int, int]], size: int) -> None:
    """Pieces of a sequence join without a gap, end at multiples of their size but for the tail, and hold its rows."""
    assembler, positions = PieceAssembler(len(LAYERS), ROW_BYTES, size), list(starts)
    pieces: dict[str, list[HiddenPiece]] = {str(number): [] for number in range(len(starts))}
    for number, start in enumerate(starts):
        assembler.begin(str(number), start)
    for number, count in steps:
        if number < len(starts):
            filled = assembler.append(str(number), rows_of(number, positions[number], count))
            pieces[str(number)] += [sealed(piece) for piece in filled]
            positions[number] += count
    tails = {name: tail and sealed(tail) for name, tail in ((name, assembler.end(name)) for name in pieces)}

    for number, start in enumerate(starts):
        whole, tail = pieces[str(number)], tails[str(number)]
        assert all(piece.end % size == 0 for piece in whole)
        position = start
        for piece in [*whole, *([tail] if tail else [])]:
            assert (piece.first, piece.layers) == (position, LAYERS)
            expected = rows_of(number, piece.first, piece.tokens)
            for index, layer in enumerate(LAYERS):
                np.testing.assert_array_equal(piece.layer_rows(layer), expected[index])
            position = piece.end
        assert position == positions[number]


def test_a_sequence_begins_once() -> None:
    """A second begin before the end is the caller's mistake."""
    assembler = PieceAssembler(len(LAYERS), ROW_BYTES)
    assembler.begin("r", 0)

    with pytest.raises(InvariantViolated):
        assembler.begin("r", 64)


def test_a_changed_bit_or_another_place_does_not_verify() -> None:
    """Each layer is verified alone: the others stay good."""
    rows = rows_of(0, 64, 64)
    piece = HiddenPiece.seal("r", 64, LAYERS, rows)
    moved = HiddenPiece("r", 128, LAYERS, rows, piece.checksums)
    swapped = HiddenPiece("r", 64, (2, 0, 5), rows, piece.checksums)
    for bad in (moved, swapped):
        with pytest.raises(PiecesRefused, match="not what was saved"):
            bad.layer_rows(0)

    rows[1, 30, 2] ^= 1

    piece.layer_rows(0)
    with pytest.raises(PiecesRefused, match="layer 2 of the piece at token 64"):
        piece.layer_rows(2)
    with pytest.raises(PiecesRefused, match="lacks layer 1"):
        piece.layer_rows(1)
