"""Sparse prefixes: parts of a prompt on the disk whose important tokens alone are read (IMPRESS 4.1).

For a request that allows it, the worker may read the run of chunks behind the reusable prefix sparsely, in the step of
its first chunk (ADR 0015). This is chosen while the request waits, like any other way to restore
(:mod:`restoration_choice`), and then nothing is fetched and nothing waited for. The tokens that it covers are settled
at admission. Where it is useless by then, because KV in front of it was evicted or its tokens came another way, the
request is looked at again.

KV computed behind a sparse prefix is lossy. It belongs to its request alone: it enters no tree, is saved nowhere, and
no request waits for it.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from services.scheduler.core.cache.prefix_tree import PAGE_NUMBER_BYTES
from services.scheduler.core.sparse.sparse_costs import sparse_prices
from services.scheduler.core.sparse.sparse_records import SparseChoice, SparseSpan
from services.scheduler.core.waiting.waits import withdraw
from shared.chunks import chunk_tokens
from shared.errors import InvariantViolated
from shared.ids import DIGEST_BYTES
from shared.importance import LEAST_RATIO
from shared.messages.base import pack_int32
from shared.messages.worker_plans import SparsePrefix

if TYPE_CHECKING:
    from services.scheduler.core.cache.identities import ChunkNames
    from services.scheduler.core.request import Request
    from services.scheduler.core.state import CellState, Storage, Worker
    from shared.messages.requests import Importance

SPARSE_CHUNKS = 4096
"""Chunks of one sparse prefix at most. Bounds the size of its order."""

NOT_LOADED = -1
"""Entry of a page table in the place of a sparse prefix's pages."""


READING_IN_PART = ("planned", "important")
"""Settings of ``restoring`` with which prefixes are read sparsely: ``planned`` weighs it, ``important`` always does so.
The others lose nothing.
"""


def may_be_sparse(state: CellState, request: Request, worker: Worker, storage: Storage) -> bool:
    """Return whether this worker may read a part of a request's prompt sparsely from this storage, if it has any.

    Changes nothing.
    """
    importance = request.submit.cache.importance
    is_allowed = importance is not None and LEAST_RATIO <= importance.ratio <= 1.0 and request.may_reuse
    is_possible = bool(storage.sparse.chunks) and not request.sparse.is_refused
    return is_allowed and is_possible and not worker.reads_no_parts and state.config.restoring in READING_IN_PART


def usable_sparse_end(
    state: CellState, request: Request, worker: Worker, storage: Storage, names: ChunkNames, first: int, covered: int
) -> int:
    """Return the end of the chunks from ``first`` on that may be read sparsely; ``first`` where they are too few.

    ``covered`` tokens of the request need not be read. Changes nothing; O(chunks).
    """
    if not may_be_sparse(state, request, worker, storage):
        return first
    end, most = first, min(names.count, first + SPARSE_CHUNKS)
    while end < most and names[end] in storage.sparse.chunks:
        end += 1
    size = chunk_tokens(state.tree.page_size)
    return end if end * size - covered >= max(1, state.config.min_prefetch_tokens) else first


def choose_sparse(
    state: CellState, request: Request, storage: Storage, names: ChunkNames, first: int, end: int
) -> None:
    """Mark chunks [first, end) of a waiting request for a sparse read: no request may wait for what it computes."""
    chunks = b"".join(names[index] for index in range(first, end))
    request.sparse.choice = SparseChoice(storage.storage_id, first * chunk_tokens(state.tree.page_size), chunks)
    withdraw(state, request)


def span_for(state: CellState, request: Request, worker: Worker, covered: int) -> SparseSpan | None:
    """Return the sparse prefix that a waiting request would get now, behind ``covered`` tokens (whole pages).

    None where it was not chosen, or is useless by now. Changes nothing; O(chunks).
    """
    choice = request.sparse.choice
    if choice is None or covered < choice.depth:
        return None
    storage = state.storage_of(worker)
    if storage is None or storage.storage_id != choice.storage_id or not may_be_sparse(state, request, worker, storage):
        return None
    size = chunk_tokens(state.tree.page_size)
    first = end = (covered - choice.depth) // size
    chunks = choice.chunks
    while end < len(chunks) // DIGEST_BYTES and _name(chunks, end) in storage.sparse.chunks:
        end += 1
    until = choice.depth + end * size
    if until - covered < max(1, state.config.min_prefetch_tokens):
        return None
    return SparseSpan(
        storage_id=storage.storage_id,
        start=covered,
        end=until,
        depth=choice.depth + first * size,
        chunks=chunks[first * DIGEST_BYTES : end * DIGEST_BYTES],
    )


def drop_choice(state: CellState, request: Request) -> None:
    """Drop a chosen sparse prefix that is useless by now; the request is looked at again."""
    request.sparse.choice = None
    if state.recollection is not None:
        state.recollection.note_weighed(request.request_id, ())
    request.prefetch.is_due = True
    state.count("sparse_choices_dropped")


def pages_spared(span: SparseSpan, page_size: int) -> int:
    """Return the number of entries of a page table without a page, because the span's tokens are not loaded."""
    return (span.end - span.start) // page_size


def pages_for_chosen(span: SparseSpan, importance: Importance | None, page_size: int) -> int:
    """Return the number of pages for the tokens that each layer chooses of a span.

    Raises InvariantViolated where the request did not allow lossy KV.
    """
    return -(-ceil(_demanded(importance).ratio * (span.end - span.start)) // page_size)


def begin_sparse(
    state: CellState, request: Request, worker: Worker, span: SparseSpan, pages: bytes, before: int
) -> bytes:
    """Begin a request that is admitted with this span; return its table's pages (packed) that no tree node owns.

    Of the leased ``pages`` the first ``before`` belong in front of the span; the last hold its chosen tokens.
    """
    importance = _demanded(request.submit.cache.importance)
    page_size = state.tree.page_size
    behind = len(pages) - pages_for_chosen(span, importance, page_size) * PAGE_NUMBER_BYTES
    span.pages = pages[behind:]
    prices = sparse_prices(state, worker, state.storages[span.storage_id], importance)
    if prices is not None:
        tokens = span.end - span.start
        span.expected_keys_us, span.expected_us = prices.keys.expecting(tokens), prices.chosen.expecting(tokens)
        span.predicted_us = prices.reading(tokens)
    request.sparse.span = span
    state.count("sparse_prefixes")
    state.count("sparse_tokens_planned", span.end - span.start)
    gap = pack_int32([NOT_LOADED] * pages_spared(span, page_size))
    return pages[: before * PAGE_NUMBER_BYTES] + gap + pages[before * PAGE_NUMBER_BYTES : behind]


def sparse_order(request: Request) -> SparsePrefix | None:
    """Return the worker's order for the sparse prefix of a request that was just admitted; None without one."""
    span = request.sparse.span
    if span is None:
        return None
    return SparsePrefix(
        storage_id=span.storage_id,
        namespace=request.submit.namespace,
        start=span.start,
        end=span.end,
        depth=span.depth,
        chunks=span.chunks,
        pages=span.pages,
        importance=_demanded(request.submit.cache.importance),
        key_id=request.submit.key_id,
    )


def _demanded(importance: Importance | None) -> Importance:
    """Return ``importance``. Raises InvariantViolated for None: only requests that allow it get lossy KV."""
    if importance is None:
        raise InvariantViolated("a request that is to be exact was given a sparse prefix")
    return importance


def _name(chunks: bytes, index: int) -> bytes:
    return chunks[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
