"""Checks of a sparse prefix against its order, so that no request can read or write pages of others. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.worker.importance.metrics import METRICS
from services.worker.importance.selection import tokens_loaded
from shared.chunks import chunk_tokens
from shared.ids import DIGEST_BYTES
from shared.importance import LEAST_RATIO
from shared.messages.requests import Importance
from shared.messages.worker_plans import AdmitRequest, SparsePrefix


def sparse_fault(
    order: AdmitRequest, sparse: SparsePrefix, table: npt.NDArray[np.int32], page_size: int, pool_pages: int
) -> str:
    """Return what is wrong with the sparse prefix of ``order``, or "".

    ``table`` is the order's page table, int32.
    """
    if order.hidden_lease is not None:
        return "hidden states behind a sparse prefix are lossy and cannot be saved"
    return (
        _span_fault(order, sparse, page_size)
        or _importance_fault(sparse.importance)
        or _table_fault(sparse, table, page_size, pool_pages)
    )


def _span_fault(order: AdmitRequest, sparse: SparsePrefix, page_size: int) -> str:
    start, end, depth, chunk = sparse.start, sparse.end, sparse.depth, chunk_tokens(page_size)
    if not 0 <= start < end < len(order.tokens) // 4 or start % page_size or end % page_size:
        return f"tokens [{start}, {end}) of {len(order.tokens) // 4} are no sparse prefix"
    if order.cached_tokens != end:
        return f"{order.cached_tokens} tokens are cached, but the sparse prefix ends at {end}"
    if not max(0, start - chunk + 1) <= depth <= start or depth % chunk:
        return f"a chunk of {chunk} tokens that begins at {depth} does not hold token {start}"
    if len(sparse.chunks) % DIGEST_BYTES or depth + len(sparse.chunks) // DIGEST_BYTES * chunk != end:
        return f"{len(sparse.chunks)} bytes of chunk names do not name tokens [{depth}, {end})"
    return ""


def _importance_fault(importance: Importance) -> str:
    if not LEAST_RATIO <= importance.ratio <= 1:
        return f"{importance.ratio} of a prefix cannot be loaded"
    if importance.metric not in METRICS:
        return f"there is no importance metric {importance.metric!r}"
    if importance.first_tokens < 0 or importance.recent_tokens < 0:
        return "the numbers of first and recent tokens to load cannot be negative"
    return ""


def _table_fault(sparse: SparsePrefix, table: npt.NDArray[np.int32], page_size: int, pool_pages: int) -> str:
    span = table[sparse.start // page_size : sparse.end // page_size]
    if (span != -1).any() or (table == -1).sum() != len(span):
        return "page-table entries that are -1 are not those of the sparse prefix"
    if len(sparse.pages) % 4:
        return "the sparse prefix's pages are not whole numbers"
    pages = np.frombuffer(sparse.pages, dtype="<i4")
    if len(pages) and (pages.min() < 0 or pages.max() >= pool_pages):
        return f"a page of the sparse prefix is outside the pool of {pool_pages}"
    if len(np.unique(pages)) < len(pages) or np.isin(pages, table).any():
        return "a page of the sparse prefix is named twice"
    needed = tokens_loaded(sparse.importance.ratio, sparse.end - sparse.start)
    if len(pages) * page_size < needed:
        return f"{len(pages)} pages do not hold the {needed} tokens that are loaded"
    return ""
