"""Warming: chunks that are often read sparsely are fetched to host memory, for the next requests to use whole.

IMPRESS moves a chunk up when its score is above the lowest of the tier above (4.4.2). Here, when a sparse prefix was
read, its first chunks are fetched as KV if they have been read as often as selective admission asks for, and none of
the coldest host copies that would have to go is worth more. Sparse reads go on until they have cost the disk as much
as fetching would have: renting for no longer than the price of buying pays at most twice the optimum. The fetch
is for no waiting request, so it has the lowest priority: it is of a few chunks, one at a time, and begins only while
the storage has nothing else to fetch. Otherwise it is left until the prefix is read the next time.

It begins with workers' reports of sparse prefixes: how long reading took and what was important, or that it failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.digests import extend, root_digest
from services.scheduler.core.cache.heat import value_of
from services.scheduler.core.cache.hotness.tracking import prefix_read
from services.scheduler.core.cache.identities import ChunkNames, usable_pages
from services.scheduler.core.cache.insertion import value_path
from services.scheduler.core.cache.prefix_match import match_prefix
from services.scheduler.core.cache.prefix_tree import Path, head_of
from services.scheduler.core.lifecycle import ADMITTED
from services.scheduler.core.speed_fit import IMPORTANT_FROM_DISK
from services.scheduler.core.tiers.fetch_orders import KvRun, begin_warming, sequence_of
from shared.chunks import chunk_tokens
from shared.ids import DIGEST_BYTES, TOKEN_BYTES, split_digests

if TYPE_CHECKING:
    from services.scheduler.core.request import Request
    from services.scheduler.core.sparse.sparse_records import SparseSpan
    from services.scheduler.core.state import CellState, Storage, Worker
    from services.scheduler.core.step import Step
    from shared.messages.worker_events import SparseLoaded


WARMED_CHUNKS = 16
"""Chunks of one fetch at most: a fetch that a request waits for may stand behind it for so long."""


def warm(step: Step, storage: Storage, request: Request, span: SparseSpan, path: Path, disk_bytes: int) -> None:
    """Fetch the hot chunks of a sparse prefix that was read once more, by ``disk_bytes``, if that costs no other fetch.

    ``path`` is the match of the request's tokens up to the end of the span.
    """
    state = step.state
    digest = _digest(state, request, span)
    prefix_read(state, digest, len(path) + 1)
    frequency, clock = state.hotness.lookup(digest)
    has_pool = storage.pool is not None and state.config.host_tier
    least = max(state.config.admission_frequency, _reads_for_a_fetch(state, span, disk_bytes))
    if frequency < least or not has_pool or _is_busy(state, storage):
        return
    tree, tokens = state.tree, request.tokens
    names = ChunkNames(tree, request.submit.namespace, tokens, path, usable_pages(tree, tokens))
    covered = _in_host_memory(storage, path, span.start // tree.page_size)
    first = covered // names.pages_each
    end = _end_of_hot(storage, names, first, span.end // chunk_tokens(tree.page_size), least)
    if end == first:
        return
    length = (end - first) * chunk_tokens(tree.page_size)
    share = storage.sparse.shares.importance_of([names[index] for index in range(first, end)])
    value = share * value_of(state, frequency=frequency, clock=clock, length=length)
    begin_warming(step, sequence_of(request), storage, path, KvRun(names, first, end, covered), value)


def _digest(state: CellState, request: Request, span: SparseSpan) -> int:
    """Return the digest by which a node that began with the span would be remembered. Changes nothing."""
    above = extend(root_digest(request.submit.namespace), request.tokens[: span.start * TOKEN_BYTES])
    return extend(above, head_of(state.tree, request.tokens[span.start * TOKEN_BYTES : span.end * TOKEN_BYTES]))


def _reads_for_a_fetch(state: CellState, span: SparseSpan, disk_bytes: int) -> int:
    """Return how many sparse reads like this one cost the disk as much as fetching the whole span.

    At most the largest frequency that can be counted. Changes nothing.
    """
    if state.geometry is None or disk_bytes <= 0:
        return 0
    whole = (span.end - span.start) * state.geometry.token_bytes
    return min(-(-whole // disk_bytes), (1 << state.config.frequency_bits) - 1)


def _is_busy(state: CellState, storage: Storage) -> bool:
    """Return whether the storage fetches something, owes an answer, or has requests that wait for room.

    Changes nothing.
    """
    name = storage.storage_id
    fetches_kv = any(fetch.storage_id == name for fetch in state.fetches.values())
    fetches_hidden = any(fetch.storage_id == name for fetch in state.hidden_fetches.values())
    return fetches_kv or fetches_hidden or bool(storage.fetching.due) or bool(storage.fetching.late)


def _in_host_memory(storage: Storage, path: Path, start: int) -> int:
    """Return the number of pages from the root up to the first without a host copy, at least ``start``.

    Changes nothing.
    """
    position = 0
    for node, pages in path:
        if position + pages > start and storage.storage_id not in node.host:
            break
        position += pages
    return max(position, start)


def _end_of_hot(storage: Storage, names: ChunkNames, first: int, most: int, least: int) -> int:
    """Return the end of the chunks from ``first`` on that the disk has as KV and were read so often.

    Changes nothing.
    """
    end, most = first, min(most, names.count, first + WARMED_CHUNKS)
    shares = storage.sparse.shares.by_name
    while end < most and names[end] in storage.disk.chunks and names[end] in shares:
        if shares[names[end]].reads < least:
            break
        end += 1
    return end


def sparse_loaded(step: Step, worker: Worker, report: SparseLoaded) -> None:
    """Learn from a sparse prefix that was read: what that cost, and how much of each chunk was chosen."""
    state = step.state
    request = state.requests.get(report.request_id)
    if request is None or request.attempt != report.attempt or request.worker_id != worker.worker_id:
        return  # It left while the step was under way.
    span = request.sparse.span
    if span is None or request.state not in ADMITTED or len(report.shares) * DIGEST_BYTES != len(span.chunks):
        state.count("malformed_inputs")
        return
    state.count("sparse_tokens_read", span.end - span.start)
    state.count("sparse_disk_bytes", max(0, report.disk_bytes))
    state.predictions.note(IMPORTANT_FROM_DISK, span.predicted_us, report.read_us)
    if report.keys_us >= 0 and state.recollection is not None:
        taken = {"keys": report.keys_us, "chosen": max(0, report.read_us - report.keys_us)}
        state.recollection.note_taken(report.request_id, report.attempt, taken)
    storage = state.storages.get(span.storage_id)
    if storage is None:
        return
    # A worker's first read makes the memory that it lends, and the storage maps it: that takes longer than most reads.
    if worker.has_read_parts and report.read_us > 0:
        _note_paces(storage, span, report)
    worker.has_read_parts = True
    if state.config.importance_caching:
        _learn(step, storage, request, span, report)


def _note_paces(storage: Storage, span: SparseSpan, report: SparseLoaded) -> None:
    """Learn how long computation waits for keys, and for chosen tokens."""
    keys_us = min(report.keys_us, report.read_us)
    if keys_us < 0:  # A worker of an earlier release: both parts were as fast.
        keys_us = round(report.read_us * span.expected_keys_us / max(1.0, span.expected_keys_us + span.expected_us))
    # Keys that were prefetched in time took nothing.
    storage.sparse.keys_pace.note(span.expected_keys_us, max(1, keys_us))
    storage.sparse.pace.note(span.expected_us, max(1, report.read_us - keys_us))


def _learn(step: Step, storage: Storage, request: Request, span: SparseSpan, report: SparseLoaded) -> None:
    """Learn the importance of chunks from the tokens chosen of them, and warm hot ones."""
    state = step.state
    storage.sparse.shares.note(split_digests(span.chunks), report.shares)
    pages = span.end // state.tree.page_size
    path = match_prefix(state.tree, request.submit.namespace, request.tokens, pages)
    value_path(state, storage, path, span.start)
    warm(step, storage, request, span, path, report.disk_bytes)


def sparse_refused(state: CellState, request: Request) -> None:
    """Start a request again without the sparse prefix that could not be read.

    The chunks are not forgotten: the storage says what it has lost.
    """
    state.count("sparse_refused")
    request.sparse.is_refused = True
