"""What workers say of sparse prefixes: how long reading them took and what was important of them, or that it failed."""

from __future__ import annotations

from services.scheduler.core.cache.prefix_tree import match_prefix
from services.scheduler.core.cache.shares import note_shares, value_path
from services.scheduler.core.hidden.planner import note, note_restoration
from services.scheduler.core.hidden.restoration_choice import IMPORTANT_FROM_DISK
from services.scheduler.core.lifecycle import ADMITTED
from services.scheduler.core.sparse.sparse_records import SparseSpan
from services.scheduler.core.sparse.warming import warm
from services.scheduler.core.state import CellState, Request, Storage, Worker, count
from services.scheduler.core.step import Step
from shared.ids import DIGEST_BYTES, split_digests
from shared.messages.worker_events import SparseLoaded


def sparse_loaded(step: Step, worker: Worker, report: SparseLoaded) -> None:
    """A sparse prefix was read: learn what that cost, and of which chunks how much was chosen."""
    state = step.state
    request = state.requests.get(report.request_id)
    if request is None or request.attempt != report.attempt or request.worker_id != worker.worker_id:
        return  # It left while the step was under way.
    span = request.sparse
    if span is None or request.state not in ADMITTED or len(report.shares) * DIGEST_BYTES != len(span.chunks):
        count(state, "malformed_inputs")
        return
    count(state, "sparse_tokens_read", span.end - span.start)
    count(state, "sparse_disk_bytes", max(0, report.disk_bytes))
    note_restoration(state.predictions, IMPORTANT_FROM_DISK, span.predicted_us, report.read_us)
    storage = state.storages.get(span.storage_id)
    if storage is None:
        return
    note(storage.sparse_pace, span.expected_us, report.read_us)
    if state.config.importance_caching:
        _learn(step, storage, request, span, report)


def _learn(step: Step, storage: Storage, request: Request, span: SparseSpan, report: SparseLoaded) -> None:
    """What was chosen of each chunk says what caching it would be worth; what is hot comes up."""
    state = step.state
    note_shares(storage.shares, split_digests(span.chunks), report.shares)
    pages = span.end // state.tree.page_size
    path = match_prefix(state.tree, request.submit.namespace, request.tokens, pages)
    value_path(state, storage, path, span.start)
    warm(step, storage, request, span, path, report.disk_bytes)


def sparse_refused(state: CellState, request: Request) -> None:
    """A sparse prefix could not be read: its request starts again without one.

    The chunks are not forgotten: the storage says what it has lost.
    """
    count(state, "sparse_refused")
    request.is_sparse_refused = True
