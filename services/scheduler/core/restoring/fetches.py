"""Fetches, disk or object store to host: the storage's answers to them, and how they end.

A fetch is over when the storage says so, or when the storage is lost. Until then its pages stay leased, for the
storage may still be writing to them; one that was cut off, by its deadline or because no request waits for it, serves
no request any more, and the chunks that it has brought stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.prefix_tree import PAGE_NUMBER_BYTES
from services.scheduler.core.cache.shares import ChunkShares
from services.scheduler.core.cache.victims import hold
from services.scheduler.core.hidden.hidden_fetches import (
    abandon_hidden_fetches,
    cancel_hidden_fetches,
    cut_off_hidden,
    expire_hidden_fetch,
    hidden_fetched,
)
from services.scheduler.core.rates import note_fetch
from services.scheduler.core.restoring.prefetch import prefetch
from services.scheduler.core.restoring.restoration_ways import may_restore
from services.scheduler.core.tiers.catalogue import arrived_chunks, chunks_gone
from services.scheduler.core.tiers.fetch_insertion import give_back, insert_fetched
from services.scheduler.core.tiers.lending import end_loan
from services.scheduler.core.tiers.loads import note_fetched_kv
from services.scheduler.core.tiers.saves import remember_taken
from services.scheduler.core.tiers.under_way import leased_pages
from services.scheduler.core.waiting.waits import end_fetch_wait, wake
from shared.chunks import chunk_pages, chunk_tokens
from shared.ids import DIGEST_BYTES, split_digests
from shared.messages.storage_plans import CancelFetch

if TYPE_CHECKING:
    from services.scheduler.core.hidden.hidden_in_flight import HiddenFetch
    from services.scheduler.core.request import Request
    from services.scheduler.core.state import CellState, Storage
    from services.scheduler.core.step import Step
    from services.scheduler.core.tiers.under_way import Fetch
    from shared.messages.storage_events import ChunksFetched


def chunks_fetched(step: Step, storage: Storage, message: ChunksFetched) -> None:
    """Take over chunks that arrived; wake requests whose part is complete, or whose fetch is over."""
    state = step.state
    hidden_fetch = state.hidden_fetches.get(message.fetch_id)
    if hidden_fetch is not None and hidden_fetch.storage_id == storage.storage_id:
        _find_other_means(step, hidden_fetched(step, storage, hidden_fetch, message))
        return
    chunks_gone(state, storage, message.missing)
    fetch = state.fetches.get(message.fetch_id)
    if fetch is None or fetch.storage_id != storage.storage_id:
        state.count("stale_inputs")
        return
    arrived = max(fetch.chunks, arrived_chunks(state, message.chunks, _chunks_of(fetch)))
    if arrived > fetch.chunks:
        before = fetch.chunks
        if fetch.is_warming and fetch.lender_id:  # Only chunks handed on by a leaving node are both.
            end = arrived * chunk_pages(state.tree.page_size) * PAGE_NUMBER_BYTES
            state.count("handed_on_pages", leased_pages(fetch.pages[:end]))
        deepest = insert_fetched(step, storage, fetch, arrived)
        if deepest is not None:
            for name in fetch.waiters:
                hold(state, storage, name, deepest.id)
        _credit(state, storage, fetch, arrived - before, message.remote_chunks)
        if not storage.disk.budget_bytes and not fetch.lender_id:
            remember_taken(storage, fetch.names[before * DIGEST_BYTES : arrived * DIGEST_BYTES])
    if message.is_over:
        if storage.fetching.due:
            state.roomy[storage.storage_id] = None
        note_fetch(state, storage, fetch, message)
        _finish(step, storage, fetch, message)
    else:
        reached = fetch.depth + arrived * chunk_tokens(state.tree.page_size)
        for name in list(fetch.waiters):
            if state.requests[name].prefetch.end <= reached:
                _settle(step, fetch, state.requests[name], is_whole=True)


def expire_fetch(step: Step, fetch: Fetch) -> None:
    """Cut off a fetch whose deadline passed. Copies that a leaving node hands on are ordered again."""
    step.state.count("fetch_deadlines")
    _note_copy(step.state, fetch)
    fetch.expire()
    step.state.storages[fetch.storage_id].fetching.late += 1
    _cut_off(step, fetch)


def hidden_fetch_expired(step: Step, fetch: HiddenFetch) -> None:
    """End a fetch of hidden states whose deadline passed."""
    _find_other_means(step, expire_hidden_fetch(step, fetch))


def _find_other_means(step: Step, request: Request | None) -> None:
    """Prefetch KV, if any, for a request whose hidden states do not come."""
    if request is not None:
        prefetch(step, request)


def cancel_unwanted(step: Step) -> None:
    """Cut off the fetches that lost their last waiter in this step, unless another request joined them since."""
    state = step.state
    for fetch_id in state.unwanted:
        fetch = state.fetches.get(fetch_id)
        is_idle = fetch is not None and not fetch.waiters and not fetch.is_called_off and not fetch.is_warming
        if fetch is not None and is_idle and fetch.chunks < _chunks_of(fetch):
            _cut_off(step, fetch)
        hidden_fetch = state.hidden_fetches.get(fetch_id)
        if hidden_fetch is not None and not hidden_fetch.request_id and not hidden_fetch.is_called_off:
            cut_off_hidden(step, hidden_fetch)
    state.unwanted.clear()


def cancel_fetches(step: Step, namespace: str) -> None:
    """Cut off the fetches of a namespace, or of all if it is ""."""
    for fetch in step.state.fetches.values():
        if namespace in ("", fetch.namespace) and not fetch.is_called_off:
            _cut_off(step, fetch)
    cancel_hidden_fetches(step, namespace)


def abandon_fetches(step: Step, storage: Storage, *, is_lost: bool) -> None:
    """Drop the fetches into a host pool that is gone or replaced: no page is given back.

    Copies that a leaving node hands on are ordered again, from another node where there is one.
    """
    state = step.state
    for fetch in [fetch for fetch in state.fetches.values() if fetch.storage_id == storage.storage_id]:
        if not is_lost and not fetch.is_called_off:
            step.to_storage(storage, CancelFetch(fetch_id=fetch.fetch_id))
        step.cancel_timer(fetch.timer_id)
        _note_copy(state, fetch)
        end_loan(state, fetch)
        del state.fetches[fetch.fetch_id]
        state.count("fetches_failed")
        _release_waiters(step, fetch)
    abandon_hidden_fetches(step, storage, is_lost=is_lost)
    storage.disk.chunks, storage.fetching.chunks, storage.fetching.pages = {}, {}, 0
    storage.sparse.chunks, storage.sparse.shares = {}, ChunkShares()
    storage.fetching.ahead, storage.fetching.due, storage.fetching.late = {}, {}, 0
    storage.fetching.held = {}


def _finish(step: Step, storage: Storage, fetch: Fetch, message: ChunksFetched) -> None:
    """Finish a fetch that the storage is done with. Where it came whole, the next part is fetched."""
    state = step.state
    step.cancel_timer(fetch.timer_id)
    _note_copy(state, fetch)
    give_back(state, storage, fetch, 0, len(fetch.pages) // PAGE_NUMBER_BYTES)
    _forget_names(storage, fetch)
    end_loan(state, fetch)
    del state.fetches[fetch.fetch_id]
    storage.fetching.late -= fetch.is_late
    is_whole = fetch.chunks == _chunks_of(fetch)
    if fetch.remote_chunks:
        storage.fetching.blanks.note_something("kv")
    state.count(_outcome(storage, fetch, message, is_whole=is_whole))
    reached = fetch.depth + fetch.chunks * chunk_tokens(state.tree.page_size)
    is_of_disk = not fetch.remote_chunks and not fetch.lender_id
    near = _waiters_near(state, storage, fetch)
    for first in near[:1] if is_whole and is_of_disk else ():
        tokens = fetch.chunks * chunk_tokens(state.tree.page_size)
        note_fetched_kv(state.requests[first], fetch.predicted_us, message.seconds * 1e6, tokens)
    for name in list(fetch.waiters):
        request = state.requests[name]
        is_done = request.prefetch.end <= reached
        if name not in near:  # It reads the chunks here.
            request.prefetch.is_loan_over, is_done = request.prefetch.is_loan_over or not fetch.chunks, True
        elif fetch.lender_id and not is_done:
            request.prefetch.is_loan_over = is_done = True  # It may come from elsewhere.
        _settle(step, fetch, request, is_whole=is_done or _may_come_as_hidden(step, storage, request, fetch, reached))


def _outcome(storage: Storage, fetch: Fetch, message: ChunksFetched, *, is_whole: bool) -> str:
    """Return the counter of a fetch's end. An object store is asked for what it may have, and often has less."""
    if is_whole:
        return "fetches_done"
    if fetch.is_called_off:
        return "fetches_cancelled"
    may_lack = storage.disk.has_remote and not fetch.lender_id
    return "fetches_short" if may_lack and not message.error else "fetches_failed"


def _note_copy(state: CellState, fetch: Fetch) -> None:
    """End a copy of a leaving node's memory: what did not arrive is ordered again."""
    drain, geometry = state.handing.get(fetch.lender_id), state.geometry
    is_whole = fetch.chunks == _chunks_of(fetch)
    if drain is None or geometry is None or is_whole or not fetch.is_warming or fetch.is_called_off:
        return
    if fetch.lent_node:
        drain.note_failed(fetch.lent_node, leased_pages(fetch.pages) * geometry.page_bytes)


def _may_come_as_hidden(step: Step, storage: Storage, request: Request, fetch: Fetch, reached: int) -> bool:
    """Return whether the object store may have hidden states behind the end of a request's KV at ``reached`` tokens.

    Chunks that were asked for as KV are not ordered again.
    """
    worker = step.state.workers[request.worker_id]
    if not storage.disk.has_remote or not may_restore(step.state, request, worker, storage):
        return False
    if fetch.chunks:
        request.prefetch.lacks.note("kv", reached)
    else:
        storage.fetching.blanks.note_nothing("kv")
        request.prefetch.lacks.note("kv", reached)
    return True


def _cut_off(step: Step, fetch: Fetch) -> None:
    """Cancel a fetch that no request needs any more; its pages stay leased until the storage answers."""
    storage = step.state.storages[fetch.storage_id]
    fetch.call_off()
    step.cancel_timer(fetch.timer_id)
    _forget_names(storage, fetch)
    step.to_storage(storage, CancelFetch(fetch_id=fetch.fetch_id))
    _release_waiters(step, fetch)


def _release_waiters(step: Step, fetch: Fetch) -> None:
    for name in list(fetch.waiters):
        _settle(step, fetch, step.state.requests[name], is_whole=False)


def _settle(step: Step, fetch: Fetch, request: Request, *, is_whole: bool) -> None:
    """End a fetch for one of its requests. If it brought all that it could, more may follow."""
    del fetch.waiters[request.request_id]
    if not fetch.waiters:
        step.state.unwanted[fetch.fetch_id] = None
    request.prefetch.fetch = request.prefetch.end = 0
    end_fetch_wait(step, request)
    if is_whole:
        prefetch(step, request)
    # A request that waits for a producer may have got those tokens from below.
    if request.wait.fetch or request.wait.producer:
        wake(step.state, request)
    step.touch(request.worker_id)


def _credit(state: CellState, storage: Storage, fetch: Fetch, chunks: int, remote_chunks: int) -> None:
    """Record for which requests these chunks were brought, and from where; they count against the first of them."""
    size = chunk_tokens(state.tree.page_size)
    remote = min(max(0, remote_chunks - fetch.remote_chunks), chunks)
    fetch.remote_chunks += remote
    state.count("fetched_tokens", chunks * size)
    state.count("fetched_tokens_remote", remote * size)
    if fetch.lender_id:
        state.count("fetched_tokens_lent", chunks * size)
    reached = fetch.depth + fetch.chunks * size
    near = _waiters_near(state, storage, fetch)
    if fetch.waiters and not near:
        state.count("raised_tokens", chunks * size)
    for first in near[:1]:
        storage.fetching.ahead[first] = storage.fetching.ahead.get(first, 0) + chunks * chunk_pages(
            state.tree.page_size
        )
    for name in near:
        request = state.requests[name]
        request.prefetch.brought_to = max(request.prefetch.brought_to, min(reached, request.prefetch.end))
        request.prefetch.brought_remote += remote * size
        request.prefetch.brought_lent += chunks * size if fetch.lender_id else 0


def _waiters_near(state: CellState, storage: Storage, fetch: Fetch) -> list[str]:
    """Return the waiters at the fetch's own node; those of other nodes read the chunks from here. Changes nothing."""
    return [name for name in fetch.waiters if state.workers[state.requests[name].worker_id].node == storage.node]


def _forget_names(storage: Storage, fetch: Fetch) -> None:
    """Take the fetch's chunks off those in flight."""
    for name in split_digests(fetch.names):
        if storage.fetching.chunks.get(name) == fetch.fetch_id:
            del storage.fetching.chunks[name]


def _chunks_of(fetch: Fetch) -> int:
    return len(fetch.names) // DIGEST_BYTES
