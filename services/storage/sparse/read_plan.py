"""Which units of which copies a read needs, where they lie in the files, and which rows of them go where. Pure.

Only blocks that hold a row that is asked for are read. Blocks of the disk are read whole, and what lies side by side
is read by one call. A chunk's units come to a **region** of memory that mirrors their part of the file, so that a row
is where its number says, however few of its neighbours were read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.storage.backends import BLOCK_BYTES, ChunkKey
from services.storage.sparse.layout import SparseLayout, whole_blocks
from services.storage.sparse.read_check import Asked

Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows for one list of ``Asked.tokens``: they are entries [start, start + len(rows)) of the list."""

    start: int
    rows: Rows
    """Where they are stored; of the probe keys, which token of the chunk they are."""


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """What is read of one copy."""

    key: ChunkKey
    place: int
    """Of the chunk among those that were asked for."""
    units: tuple[int, ...]
    """Of the layer, ascending."""
    ranges: tuple[tuple[int, int], ...]
    """(offset, bytes) of the file."""
    pieces: tuple[Piece, ...]
    """One for each list."""

    @property
    def nbytes(self) -> int:
        """That are read from the disk."""
        return sum(nbytes for _, nbytes in self.ranges)


def plan_reads(asked: Asked, inverses: Sequence[Rows], layout: SparseLayout, *, is_sealed: bool) -> list[ChunkRead]:
    """What to read of each chunk that has anything that was asked for, in order.

    ``inverses`` says for every chunk of ``asked`` at which row each of its tokens is stored, intp [tokens].
    """
    edges = np.arange(len(asked.keys) + 1) * layout.tokens
    bounds = [np.searchsorted(chosen, edges) for chosen in asked.tokens]
    reads = []
    for place, key in enumerate(asked.keys):
        pieces = []
        for chosen, bound in zip(asked.tokens, bounds, strict=True):
            tokens = chosen[bound[place] : bound[place + 1]] - place * layout.tokens
            rows = inverses[place][tokens] if asked.halves else tokens.astype(np.intp)
            pieces.append(Piece(int(bound[place]), rows))
        if any(len(piece.rows) for piece in pieces):
            units = _units(pieces, asked, layout)
            ranges = tuple(_ranges(units, asked.layer, layout, is_sealed=is_sealed))
            reads.append(ChunkRead(key, place, units, ranges, tuple(pieces)))
    return reads


def _blocks_of(rows: Rows, layout: SparseLayout) -> npt.NDArray[np.intp]:
    """The blocks that hold these rows, ascending."""
    wanted = np.zeros(layout.blocks, np.bool_)
    wanted[rows // layout.block_tokens] = True
    return np.flatnonzero(wanted)


def _units(pieces: Sequence[Piece], asked: Asked, layout: SparseLayout) -> tuple[int, ...]:
    if not asked.halves:
        return tuple(sorted(asked.heads))
    blocks = _blocks_of(np.concatenate([piece.rows for piece in pieces]), layout)
    starts = (layout.probe_heads + half * layout.blocks for half in asked.halves)
    return tuple(np.concatenate([start + blocks for start in starts]).tolist())


def _ranges(units: tuple[int, ...], layer: int, layout: SparseLayout, *, is_sealed: bool) -> list[tuple[int, int]]:
    """Whole blocks of the disk that hold the units, those that touch joined."""
    ranges: list[tuple[int, int]] = []
    for unit in units:
        start, nbytes = layout.unit_at(layer, unit, is_sealed=is_sealed)
        first = start // BLOCK_BYTES * BLOCK_BYTES
        end = whole_blocks(start + nbytes)
        if ranges and first <= sum(ranges[-1]):
            begun = ranges.pop()[0]
            ranges.append((begun, end - begun))
        else:
            ranges.append((first, end - first))
    return ranges


def region(layer: int, halves: tuple[int, ...], layout: SparseLayout, *, is_sealed: bool) -> tuple[int, int]:
    """(where the part of the file begins that a region mirrors, its bytes): the layer's probe keys, or its rows."""
    start, _ = layout.unit_at(layer, layout.probe_heads if halves else 0, is_sealed=is_sealed)
    return start, layout.layer_bytes if halves else layout.probe_bytes


def region_bytes(layout: SparseLayout) -> int:
    """Bytes of memory that any region fits in, wherever in a block of the disk it begins; whole blocks."""
    return whole_blocks(max(layout.layer_bytes, layout.probe_bytes)) + BLOCK_BYTES
