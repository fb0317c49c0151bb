"""Units and copies that a read needs, where they lie in the files, and which rows of them go where. Pure.

Blocks of the disk that hold a row that is asked for are read whole, by one call where they lie side by side or so close
that reading what is between them costs less than another call (:func:`gap_worth_reading`): of a quarter of the rows,
scattered, that makes few calls for whole layers. Nothing of a gap is verified or used. A chunk's units come to a
**region** of memory that mirrors their part of the file, so that a row is where its number says, however few of its
neighbours were read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.storage.backends import BLOCK_BYTES, ChunkKey, whole_blocks
from services.storage.sparse.layout import SparseLayout
from services.storage.sparse.read_check import Asked

Rows = npt.NDArray[np.intp]

REQUEST_S = 30e-6
"""Processor time of one more read of a block by a thread, which sleeps until it is there: 33 us on a virtual disk,
where a block of a large read costs 0.4.
"""

UNKNOWN_BYTES_PER_S = 1e9
"""Where the disk was not measured."""


def gap_worth_reading(bytes_per_s: float) -> int:
    """Return the most bytes between two parts that are worth reading with them, in whole blocks.

    ``bytes_per_s`` is the speed of the disk; 0 is not known.
    """
    return int(REQUEST_S * (bytes_per_s or UNKNOWN_BYTES_PER_S)) // BLOCK_BYTES * BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows for one list of ``Asked.tokens``: they are entries [start, start + len(rows)) of the list."""

    start: int
    rows: Rows
    """Stored rows; for codes, tokens of the chunk."""


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """What is read of one copy."""

    key: ChunkKey
    place: int
    """Number of the chunk among those that were asked for."""
    units: npt.NDArray[np.intp]
    """In each of the layers that are read, ascending."""
    ranges: tuple[tuple[int, int], ...]
    """(offset, bytes) of the file."""
    pieces: tuple[Piece, ...]
    """One for each list."""

    @property
    def nbytes(self) -> int:
        """Bytes that are read from the disk."""
        return sum(nbytes for _, nbytes in self.ranges)


def plan_reads(
    asked: Asked, inverses: Sequence[Rows], layout: SparseLayout, *, is_sealed: bool, gap_bytes: int = 0
) -> list[ChunkRead]:
    """Return what to read of each chunk with anything that was asked for, in order.

    ``inverses`` says for every chunk of ``asked`` at which row each of its tokens is stored, intp [tokens]; up to
    ``gap_bytes`` between two parts are read with them.
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
            starts, nbytes = layout.units_at(asked.layer, units, is_sealed=is_sealed)
            if asked.layers > 1:  # Codes: a head's of the next layer lie behind.
                starts = (starts[:, None] + np.arange(asked.layers) * nbytes).ravel()
            ranges = _ranges(starts, starts + nbytes, gap_bytes)
            reads.append(ChunkRead(key, place, units, ranges, tuple(pieces)))
    return reads


def _blocks_of(rows: Rows, layout: SparseLayout) -> npt.NDArray[np.intp]:
    """Return the blocks that hold these rows, ascending."""
    wanted = np.zeros(layout.blocks, np.bool_)
    wanted[rows // layout.block_tokens] = True
    return np.flatnonzero(wanted)


def _units(pieces: Sequence[Piece], asked: Asked, layout: SparseLayout) -> npt.NDArray[np.intp]:
    if not asked.halves:
        return np.array(sorted(asked.heads), np.intp)
    blocks = _blocks_of(np.concatenate([piece.rows for piece in pieces]), layout)
    return np.concatenate([layout.probe_heads + half * layout.blocks + blocks for half in asked.halves])


def _ranges(starts: Rows, ends: Rows, gap_bytes: int) -> tuple[tuple[int, int], ...]:
    """Whole blocks of the disk that hold the bytes [starts, ends), both ascending, and gaps of up to ``gap_bytes``."""
    first, end = starts // BLOCK_BYTES * BLOCK_BYTES, -(-ends // BLOCK_BYTES) * BLOCK_BYTES
    apart = np.flatnonzero(first[1:] > end[:-1] + gap_bytes)
    begun = first[np.concatenate(([0], apart + 1))]
    ended = end[np.concatenate((apart, [len(end) - 1]))]
    return tuple(zip(begun.tolist(), (ended - begun).tolist(), strict=True))


def region(asked: Asked, layout: SparseLayout, *, is_sealed: bool) -> tuple[int, int]:
    """Return where the part of the file that a region mirrors begins, and its bytes.

    The part is a layer's rows, or runs from the first to the last of the codes that are asked for.
    """
    if asked.halves:
        return layout.unit_at(asked.layer, layout.probe_heads, is_sealed=is_sealed)[0], layout.layer_bytes
    start, _ = layout.unit_at(asked.layer, min(asked.heads), is_sealed=is_sealed)
    last, nbytes = layout.unit_at(asked.layer + asked.layers - 1, max(asked.heads), is_sealed=is_sealed)
    return start, last + nbytes - start


def region_bytes(layout: SparseLayout) -> int:
    """Bytes of memory that any region fits in, wherever in a block of the disk it begins; whole blocks."""
    return whole_blocks(max(layout.layer_bytes, layout.geometry.layers * layout.probe_bytes)) + BLOCK_BYTES
