"""How rows are cut for layers that carry a state."""

from __future__ import annotations

import numpy as np
import pytest

from services.worker.engine.forward_meta import Segment
from services.worker.engine.states.pieces import Piece, cut, in_order
from shared.errors import InvariantViolated

_TABLE = np.array([7, 3, 5, 9], dtype=np.int32)


def _segment(rows: int, context: int, table: np.ndarray = _TABLE, running: int = 2) -> Segment:
    return Segment(rows, context, table, running)


def test_pieces_end_where_pages_end() -> None:
    """A prompt of two pages and a half begins with nothing, fills two pages and leaves its state in its slot."""
    pieces = cut([_segment(10, 0)], 4)

    assert pieces == [
        Piece(0, 4, 0, -1, -1, 7, -1),
        Piece(4, 4, 4, 7, -1, 3, -1),
        Piece(8, 2, 8, 3, -1, -1, 2),
    ]


def test_a_segment_within_a_page_goes_on_from_its_slot() -> None:
    """Its first piece reads the slot, and fills the page that it began in."""
    pieces = cut([_segment(3, 6)], 4)

    assert pieces == [Piece(0, 2, 6, -1, 2, 3, -1), Piece(2, 1, 8, 3, -1, -1, 2)]


def test_a_segment_within_a_page_needs_a_slot() -> None:
    """Nothing but its slot has the state at its beginning."""
    with pytest.raises(InvariantViolated, match="token 6"):
        cut([_segment(1, 6, running=-1)], 4)


def test_pages_of_one_token_need_no_slot() -> None:
    """Every token ends a page."""
    pieces = cut([_segment(2, 1, running=-1)], 1)

    assert [(piece.source_page, piece.target_page) for piece in pieces] == [(7, 3), (3, 5)]


def test_who_reads_a_page_comes_after_who_fills_it() -> None:
    """A request that shares a page which another one fills in the same step waits for it, wherever it stands."""
    sharing = np.array([7, 8], dtype=np.int32)
    segments = [_segment(1, 4, sharing, running=0), _segment(4, 0, running=1), _segment(1, 9, running=2)]

    groups = in_order(cut(segments, 4))

    places = {(piece.start, piece.first_row): number for number, group in enumerate(groups) for piece in group}
    assert places[4, 0] > places[0, 1]


def test_decoding_rows_are_computed_together() -> None:
    """Rows of several requests, from slots and from pages, are one group."""
    tables = [np.array([4 * number + page for page in range(4)], dtype=np.int32) for number in range(3)]
    segments = [_segment(1, context, tables[number], running=number) for number, context in enumerate((5, 8, 7))]

    groups = in_order(cut(segments, 4))

    assert [len(group) for group in groups] == [3]


def test_who_begins_is_apart_from_who_goes_on() -> None:
    """A layer is called without states, or with them."""
    groups = in_order(cut([_segment(1, 0), _segment(1, 5)], 4))

    assert [[piece.begins for piece in group] for group in groups] == [[False], [True]]
