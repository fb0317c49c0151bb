"""How the rows of a step are cut for layers that carry a state, and in which order the pieces are computed. Pure.

A page keeps the state at its end, and nothing else: it is written once, with the one right value, so the holder of a
page may begin behind it, whichever tier it came from. Within a page the state of a running request is in a slot of its
own (:mod:`services.worker.engine.states.running`). So a piece ends where a page ends, or where its segment does.

A piece that begins with a page waits for the piece of the same step that fills the page before, if there is one: of its
own segment, or of another request that shares its prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.worker.engine.forward_meta import Segment
from shared.errors import InvariantViolated


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows ``[first_row, first_row + rows)`` of the batch, of one request and one page.

    They begin with the state in ``source_page``, or else in ``source_slot``, or else with none: at position 0. Their
    last state goes to ``target_page`` or ``target_slot``. -1 is none.
    """

    first_row: int
    rows: int
    start: int
    source_page: int
    source_slot: int
    target_page: int
    target_slot: int

    @property
    def begins(self) -> bool:
        """Whether no token comes before."""
        return self.start == 0


def cut(segments: Sequence[Segment], page_size: int) -> list[Piece]:
    """Return the pieces of a step, segment by segment.

    Raises InvariantViolated for a segment that begins within a page and has no slot.
    """
    pieces: list[Piece] = []
    first_row = 0
    for segment in segments:
        start = segment.context
        while start < segment.length:
            end = min(segment.length, (start // page_size + 1) * page_size)
            within, ends_page = start % page_size != 0, end % page_size == 0
            if within and segment.running < 0:
                raise InvariantViolated(f"no slot has the state of a request at token {start}, within a page")
            pieces.append(
                Piece(
                    first_row=first_row,
                    rows=end - start,
                    start=start,
                    source_page=int(segment.pages[start // page_size - 1]) if start and not within else -1,
                    source_slot=segment.running if within else -1,
                    target_page=int(segment.pages[end // page_size - 1]) if ends_page else -1,
                    target_slot=-1 if ends_page else segment.running,
                )
            )
            first_row += end - start
            start = end
    return pieces


def in_order(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Return groups to compute one after another. The pieces of a group have one length, and all begin or all go on.

    Where two pieces fill one page, as two requests with the same prompt may, the pieces that read it wait for the
    first.
    """
    written: dict[int, int] = {}  # Page: depth of the first piece that fills it.
    groups: dict[tuple[int, int, bool], list[Piece]] = {}
    # A piece that fills a page comes before those that begin behind it.
    for piece in sorted(pieces, key=lambda each: each.start):
        depth = written.get(piece.source_page, -1) + 1 if piece.source_page >= 0 else 0
        if piece.target_page >= 0:
            written.setdefault(piece.target_page, depth)
        groups.setdefault((depth, piece.rows, piece.begins), []).append(piece)
    return [groups[key] for key in sorted(groups)]
