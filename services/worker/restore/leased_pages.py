"""The end of stage two in the running system: full chunks are written to leased hidden pages and sealed.

A page is cleared before it is written and sealed after, so that a chunk which was written half-way never verifies. The
lease is answered once, with the sealed chunks, even if the rest could not be saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.worker.restore.pieces import PieceRows
from shared.chunks import chunk_pages, chunk_tokens
from shared.errors import InvariantViolated
from shared.ids import DIGEST_BYTES, TOKEN_BYTES, chain_pages, split_digests
from shared.memory import HostPoolView
from shared.messages.base import pack_int32


@dataclass(frozen=True, slots=True)
class SavedHidden:
    """Outcome of a lease: ``chunks`` are sealed, and ``tokens`` (packed int32) are theirs."""

    lease_id: int
    chunks: int = 0
    tokens: bytes = b""
    lacked_pages: bool = False  # There were too few pages for the last chunk.


@dataclass(slots=True)
class LeasedRun:
    """Pages for the tokens of one sequence from ``depth`` on, where a chunk begins.

    ``tokens`` is the sequence itself, to which another thread appends, as to ``pages``; ``identity`` is that of the
    page before the next chunk.
    """

    lease_id: int
    view: HostPoolView
    depth: int
    pages: list[int]
    identity: bytes
    tokens: Sequence[int]
    chunks: int = 0
    saved: list[bytes] = field(default_factory=list)  # Tokens of each chunk, packed.
    lacked_pages: bool = False


class LeasedPages:
    """A :class:`~services.worker.restore.pieces.PieceTaker` over runs of leased pages, by name of their sequence."""

    def __init__(self, answer: Callable[[SavedHidden], None]) -> None:
        """Prepare; ``answer`` is called by the saving thread, once for each run that was opened."""
        self._answer = answer
        self._runs: dict[str, LeasedRun] = {}

    def open(self, sequence_id: str, run: LeasedRun) -> None:
        """Provide pages for a sequence that is about to begin. Called by the computing thread."""
        self._runs[sequence_id] = run

    def extend(self, sequence_id: str, pages: Sequence[int]) -> None:
        """Append pages to a sequence's run; called by the computing thread. Ignored for a run that has ended."""
        run = self._runs.get(sequence_id)
        if run is not None:
            run.pages.extend(pages)

    def take(self, piece: PieceRows) -> bool:
        """Write a chunk and seal it; return False when there are no pages for it.

        A tail that is no whole chunk is dropped. Raises InvariantViolated when the chunk is not the sequence's next.
        """
        run = self._runs[piece.sequence_id]
        geometry = run.view.geometry
        count, size = chunk_tokens(geometry.page_size), chunk_pages(geometry.page_size)
        if piece.tokens < count:
            return True
        if piece.first != run.depth + run.chunks * count:
            raise InvariantViolated(f"a hidden chunk at token {piece.first} of lease {run.lease_id} is out of turn")
        pages = run.pages[run.chunks * size : (run.chunks + 1) * size]
        if len(pages) < size:
            run.lacked_pages = True
            return False
        _write(run.view, pages, piece)
        packed = pack_int32(run.tokens[piece.first : piece.first + count])
        for page, identity in zip(
            pages, split_digests(chain_pages(run.identity, packed, geometry.page_size * TOKEN_BYTES)), strict=True
        ):
            run.view.seal_page(page, identity)
            run.identity = identity
        run.saved.append(packed)
        run.chunks += 1
        return True

    def end(self, sequence_id: str) -> None:
        """Answer the lease of a sequence with its sealed chunks; a sequence without a run is ignored."""
        run = self._runs.pop(sequence_id, None)
        if run is not None:
            self._answer(SavedHidden(run.lease_id, run.chunks, b"".join(run.saved), run.lacked_pages))


def lease_fault(depth: int, parent: bytes, pages: Sequence[int], view: HostPoolView) -> str:
    """Return why nothing can be saved under such a lease, or ""."""
    if depth < 0 or depth % chunk_tokens(view.geometry.page_size):
        return f"no chunk begins at token {depth}"
    if len(parent) != DIGEST_BYTES:
        return f"{parent.hex()} is no identity of a page"
    return pages_fault(pages, view)


def pages_fault(pages: Sequence[int], view: HostPoolView) -> str:
    """Return why these are no pages of the pool, or ""."""
    if pages and not 0 <= min(pages) <= max(pages) < view.handle.pages:
        return f"a hidden page is outside the pool of {view.handle.pages}"
    return ""


def _write(view: HostPoolView, pages: Sequence[int], piece: PieceRows) -> None:
    """Write rows [units, tokens, row_bytes] into pages [units, page_size, row_bytes]."""
    units, row_bytes = piece.rows.shape[0], piece.rows.shape[2]
    size = view.geometry.page_size
    for number, page in enumerate(pages):
        view.clear(page)
        into = view.pages[page].reshape(units, size, row_bytes)
        into[:] = piece.rows[:, number * size : (number + 1) * size]
