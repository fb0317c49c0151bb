"""What workers say of sparse prefixes: how long reading them took and what was important of them, or that it failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.node_importance import value_path
from services.scheduler.core.cache.prefix_tree import match_prefix
from services.scheduler.core.lifecycle import ADMITTED
from services.scheduler.core.prediction_error import IMPORTANT_FROM_DISK
from services.scheduler.core.sparse.warming import warm
from shared.ids import DIGEST_BYTES, split_digests

if TYPE_CHECKING:
    from services.scheduler.core.request import Request
    from services.scheduler.core.sparse.sparse_records import SparseSpan
    from services.scheduler.core.state import CellState, Storage, Worker
    from services.scheduler.core.step import Step
    from shared.messages.worker_events import SparseLoaded


def sparse_loaded(step: Step, worker: Worker, report: SparseLoaded) -> None:
    """A sparse prefix was read: learn what that cost, and of which chunks how much was chosen."""
    state = step.state
    request = state.requests.get(report.request_id)
    if request is None or request.attempt != report.attempt or request.worker_id != worker.worker_id:
        return  # It left while the step was under way.
    span = request.sparse
    if span is None or request.state not in ADMITTED or len(report.shares) * DIGEST_BYTES != len(span.chunks):
        state.count("malformed_inputs")
        return
    state.count("sparse_tokens_read", span.end - span.start)
    state.count("sparse_disk_bytes", max(0, report.disk_bytes))
    state.predictions.note(IMPORTANT_FROM_DISK, span.predicted_us, report.read_us)
    storage = state.storages.get(span.storage_id)
    if storage is None:
        return
    storage.sparse_pace.note(span.expected_us, report.read_us)
    if state.config.importance_caching:
        _learn(step, storage, request, span, report)


def _learn(step: Step, storage: Storage, request: Request, span: SparseSpan, report: SparseLoaded) -> None:
    """What was chosen of each chunk says what caching it would be worth; what is hot comes up."""
    state = step.state
    storage.shares.note(split_digests(span.chunks), report.shares)
    pages = span.end // state.tree.page_size
    path = match_prefix(state.tree, request.submit.namespace, request.tokens, pages)
    value_path(state, storage, path, span.start)
    warm(step, storage, request, span, path, report.disk_bytes)


def sparse_refused(state: CellState, request: Request) -> None:
    """A sparse prefix could not be read: its request starts again without one.

    The chunks are not forgotten: the storage says what it has lost.
    """
    state.count("sparse_refused")
    request.is_sparse_refused = True
