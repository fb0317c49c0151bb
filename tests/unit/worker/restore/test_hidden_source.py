"""Pieces are read back as rows of any run of tokens, or refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.worker.restore.hidden_shape import HiddenShape
from services.worker.restore.hidden_source import PieceSource
from services.worker.restore.pieces import HiddenPiece
from services.worker.restore.refusals import PiecesRefused

SHAPE = HiddenShape(layers=2, hidden=3, dtype="float32")


def piece(first: int, end: int, *, name: str = "r", layers: tuple[int, ...] = (0, 1)) -> HiddenPiece:
    """Rows (layer, position, position)."""
    rows = np.zeros((len(layers), end - first, 3), dtype=np.float32)
    rows[:, :, 0] = np.array(layers)[:, None]
    rows[:, :, 1:] = np.arange(first, end)[None, :, None]
    return HiddenPiece.seal(name, first, layers, rows.view(np.uint8))


@given(st.lists(st.integers(1, 199), max_size=6), st.data())
def test_any_run_of_tokens(cuts: list[int], data: st.DataObject) -> None:
    """Whatever the boundaries of the pieces and their overlaps, a run is the rows of its positions."""
    bounds = sorted({0, *cuts, 200})
    pieces = [piece(low, min(200, high + 5)) for low, high in itertools.pairwise(bounds)]
    pieces = data.draw(st.permutations(pieces))
    first = data.draw(st.integers(0, 199))
    end = data.draw(st.integers(first + 1, 200))
    source = PieceSource(SHAPE, pieces, first, end, [0, 1])
    start = data.draw(st.integers(0, end - first))
    into = torch.full((end - first - start, 3), -1.0)

    source.read(1, start, end - first, into)

    assert into[:, 0].eq(1).all()
    assert into[:, 1].tolist() == list(range(first + start, end))


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([piece(0, 64), piece(65, 128)], "token 64"),
        ([piece(1, 128)], "token 0"),
        ([piece(0, 64)], "token 64"),
        ([], "token 0"),
        ([piece(0, 64), piece(64, 128, name="other")], "several sequences"),
        ([piece(0, 128, layers=(0,))], r"lacks layers \[1\]"),
    ],
)
def test_what_is_missing_is_refused(pieces: list[HiddenPiece], reason: str) -> None:
    """Before anything is read."""
    with pytest.raises(PiecesRefused, match=reason):
        PieceSource(SHAPE, pieces, 0, 128, [0, 1])


def test_another_shape_is_refused() -> None:
    """Rows of another width or dtype, and a torn piece."""
    good = piece(0, 64)
    torn = HiddenPiece("r", 0, (0, 1), good.rows[:1], good.checksums)

    for shape, made in ((HiddenShape(2, 4, "float32"), good), (HiddenShape(2, 3, "bfloat16"), good), (SHAPE, torn)):
        with pytest.raises(PiecesRefused, match="has shape"):
            PieceSource(shape, [made], 0, 64, [0])


def test_an_altered_row_is_refused_when_it_is_read() -> None:
    """And the layers beside it are not."""
    bad = piece(0, 64)
    bad.rows[1, 63, 0] ^= 255
    source, into = PieceSource(SHAPE, [bad], 0, 64, [0, 1]), torch.empty(1, 3)

    source.read(0, 0, 1, into)
    with pytest.raises(PiecesRefused, match="layer 1"):
        source.read(1, 0, 1, into)
