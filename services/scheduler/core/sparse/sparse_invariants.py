"""Invariants of sparse prefixes and the requests that have one, checked from scratch. For tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.prefix_tree import PAGE_NUMBER_BYTES
from services.scheduler.core.cache.shares import MOST_CHUNKS
from services.scheduler.core.lifecycle import ADMITTED, RequestState
from services.scheduler.core.require import require
from services.scheduler.core.sparse.sparse_prefixes import NOT_LOADED, pages_for_chosen
from services.scheduler.core.tiers.catalogue import most_chunks
from shared.chunks import chunk_tokens
from shared.ids import DIGEST_BYTES
from shared.messages.base import unpack_int32

if TYPE_CHECKING:
    from services.scheduler.core.request import Request
    from services.scheduler.core.sparse.sparse_records import SparseChoice, SparseSpan
    from services.scheduler.core.state import CellState


def check_sparse(state: CellState) -> None:
    """Raise InvariantViolated if lossy KV could reach any request but the one that allowed it."""
    for request in state.requests.values():
        if request.sparse.choice is not None:
            _check_choice(state, request, request.sparse.choice)
        if request.sparse.span is not None:
            _check_span(state, request, request.sparse.span)
    for storage in state.storages.values():
        name, shares = storage.storage_id, storage.sparse.shares
        require(len(storage.sparse.chunks) <= most_chunks(state, storage, "sparse"), f"{name} has too many chunks")
        require(len(shares.by_name) <= MOST_CHUNKS, f"{name} remembers the shares of too many chunks")
        total = sum(known.average for known in shares.by_name.values())
        require(abs(total - shares.total) <= 1e-6 * (1.0 + total), f"{name} adds up its shares wrongly")


def _check_choice(state: CellState, request: Request, choice: SparseChoice) -> None:
    name = request.request_id
    _check_alone(state, request)
    require(request.state is RequestState.WAITING and bool(request.worker_id), f"{name} chose and does not wait")
    require(not request.prefetch.fetch and request.hidden.run is None, f"{name} is fetched for, too")
    require(not request.sparse.is_refused, f"{name} is to be read for in part once more")
    require(choice.depth % chunk_tokens(state.tree.page_size) == 0, f"{name} chose from within a chunk on")
    require(bool(choice.chunks) and len(choice.chunks) % DIGEST_BYTES == 0, f"{name} chose no chunks")


def _check_span(state: CellState, request: Request, span: SparseSpan) -> None:
    name, page_size = request.request_id, state.tree.page_size
    size = chunk_tokens(page_size)
    _check_alone(state, request)
    require(request.state in ADMITTED, f"{name} has a sparse prefix and does not run")
    require(not request.hidden.lease, f"{name} has lossy hidden states saved")
    require(span.depth <= span.start < span.end < request.token_count, f"{name} has an impossible sparse prefix")
    require(span.start % page_size == span.end % size == span.depth % size == 0, f"{name} is off the grid")
    require(span.start - span.depth < size, f"{name} names chunks that it does not read")
    require(len(span.chunks) // DIGEST_BYTES * size == span.end - span.depth, f"{name} names other chunks")
    require(request.planned >= request.computed >= span.end, f"{name} computes its sparse prefix")
    chosen = pages_for_chosen(span, request.submit.cache.importance, page_size)
    require(len(span.pages) == chosen * PAGE_NUMBER_BYTES, f"{name} has other room than for what is chosen")
    require(request.shared * page_size <= span.start, f"{name} shares what is lossy")
    if not request.is_poisoned:  # A load that failed takes pages out of the table.
        require(request.shared * page_size == span.start, f"{name} has a gap before its sparse prefix")
        first, end = span.start // page_size, span.end // page_size
        gap = unpack_int32(request.pages[first * PAGE_NUMBER_BYTES : end * PAGE_NUMBER_BYTES])
        require(gap == [NOT_LOADED] * (end - first), f"{name} has pages for what is not loaded")
    empty = unpack_int32(request.pages).count(NOT_LOADED)
    require(empty == (span.end - span.start) // page_size, f"{name} lacks other pages than those of its span")


def _check_alone(state: CellState, request: Request) -> None:
    """Raise InvariantViolated unless a lossy request allowed it, and no other waits for what it computes."""
    name = request.request_id
    require(request.submit.cache.importance is not None, f"{name} is to be exact and has a sparse prefix")
    require(not request.place.marks and name not in state.waiters, f"others wait for what {name} computes")
