"""Fetches of hidden states, disk to hidden pool: the storage's answers to them, and how they end.

Chunks that have arrived can be restored at once, while the disk goes on with the rest (HCache 3.1: the transmission of
hidden states and the computation of KV from them overlap). A fetch is over when the storage says so, or when the
storage is lost. One that ends early, or whose deadline passes, leaves its request with what has arrived; that request's
hidden states are not fetched again. Where it was unknown whether there were any, ending early is an answer and no
fault: the request asks for the other form, or computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.hidden.hidden_runs import (
    cut_run,
    drop_run,
    extend_run,
    free_pages,
    go_on_asking,
    wake_followers,
)
from services.scheduler.core.hidden.restorations import end_run
from services.scheduler.core.lifecycle import RequestState
from services.scheduler.core.tiers.catalogue import arrived_chunks, chunks_gone
from services.scheduler.core.waiting.waits import end_fetch_wait, wake
from shared.chunks import chunk_tokens
from shared.messages.pools import HIDDEN
from shared.messages.storage_plans import CancelFetch

if TYPE_CHECKING:
    from services.scheduler.core.hidden.hidden_in_flight import HiddenFetch, HiddenRun
    from services.scheduler.core.request import Request
    from services.scheduler.core.state import Storage
    from services.scheduler.core.step import Step
    from shared.messages.storage_events import ChunksFetched


def hidden_fetched(step: Step, storage: Storage, fetch: HiddenFetch, message: ChunksFetched) -> Request | None:
    """Note chunks that arrived, or the end of a fetch; return the request if it now needs another way to restore."""
    state = step.state
    chunks_gone(state, storage, message.missing, HIDDEN)
    request = state.requests.get(fetch.request_id)
    if request is not None and request.hidden.run is not None:
        arrived = arrived_chunks(state, message.chunks, fetch.chunks)
        _arrive(step, request, request.hidden.run, fetch, arrived)
    return _finish(step, storage, fetch, message) if message.is_over else None


def expire_hidden_fetch(step: Step, fetch: HiddenFetch) -> Request | None:
    """End a fetch at its deadline; return its request if it now needs another way to restore.

    Otherwise it goes on with what has arrived.
    """
    state = step.state
    state.count("fetch_deadlines")
    fetch.expire()
    state.storages[fetch.storage_id].fetching.late += 1
    request = state.requests.get(fetch.request_id)
    cut_off_hidden(step, fetch)
    return None if request is None else _end_early(step, request)


def cut_off_hidden(step: Step, fetch: HiddenFetch) -> None:
    """Cancel a fetch; the pages that it may still write to stay with it until the storage answers."""
    state = step.state
    fetch.call_off()
    step.cancel_timer(fetch.timer_id)
    step.to_storage(state.storages[fetch.storage_id], CancelFetch(fetch_id=fetch.fetch_id))
    request = state.requests.get(fetch.request_id)
    if request is not None and request.hidden.run is not None:
        cut_run(state, request.hidden.run)
    wake_followers(state, fetch)


def cancel_hidden_fetches(step: Step, namespace: str) -> None:
    """Cancel fetches of a namespace's hidden states, or of all if it is "": waiting requests compute instead."""
    for request in step.state.requests.values():
        if request.hidden.run is None or namespace not in ("", request.submit.namespace):
            continue
        if request.state is RequestState.WAITING:
            _stop_waiting(step, request)
            drop_run(step.state, request)
        elif request.hidden.run.fetch:
            cut_off_hidden(step, step.state.hidden_fetches[request.hidden.run.fetch])
            end_run(step.state, request)


def abandon_hidden_fetches(step: Step, storage: Storage, *, is_lost: bool) -> None:
    """Drop the fetches of a hidden pool that is gone or replaced: its pages are not given back.

    Where the storage is still there, it is told to cancel them.
    """
    state = step.state
    for fetch in [fetch for fetch in state.hidden_fetches.values() if fetch.storage_id == storage.storage_id]:
        if not is_lost and not fetch.is_called_off:
            step.to_storage(storage, CancelFetch(fetch_id=fetch.fetch_id))
        step.cancel_timer(fetch.timer_id)
        wake_followers(state, fetch)
        del state.hidden_fetches[fetch.fetch_id]
        state.count("hidden_fetches_failed")
    for request in state.requests.values():
        if request.hidden.run is not None and request.hidden.run.storage_id == storage.storage_id:
            _stop_waiting(step, request)
            request.hidden.run = None


def _arrive(step: Step, request: Request, run: HiddenRun, fetch: HiddenFetch, chunks: int) -> None:
    """Note that the first ``chunks`` chunks of a fetch are in the hidden pool, and wake the request."""
    size = chunk_tokens(step.state.tree.page_size)
    begin = run.end - fetch.chunks * size
    arrived = begin + chunks * size
    if arrived > run.arrived:
        step.state.count("hidden_fetched_tokens", arrived - run.arrived)
        run.arrived = arrived
        _stop_waiting(step, request)
        wake_followers(step.state, fetch)
        step.touch(request.worker_id)


def _finish(step: Step, storage: Storage, fetch: HiddenFetch, message: ChunksFetched) -> Request | None:
    """Finish a fetch that the storage is done with: its pages are not written any more.

    Returns the request if it now needs another way to restore.
    """
    state = step.state
    step.cancel_timer(fetch.timer_id)
    free_pages(state, storage.storage_id, fetch.pages)
    del state.hidden_fetches[fetch.fetch_id]
    storage.fetching.late -= fetch.is_late
    if not message.remote_chunks and message.nbytes > 0:
        storage.fetching.disk_rate.note(fetch.queued_bytes + message.nbytes, message.seconds * 1e6)
    request = state.requests.get(fetch.request_id)
    run = request.hidden.run if request is not None else None
    if request is None or run is None:
        state.count("hidden_fetches_cancelled")
        return None
    run.disk_us += max(0.0, message.seconds) * 1e6
    run.fetch = 0
    step.touch(request.worker_id)
    if run.arrived == run.end:
        state.count("hidden_fetches_done")
        if fetch.is_question:
            _was_there(step, storage, request, run)
        extend_run(step, request)
        end_run(state, request)
        return None
    if fetch.is_question:
        return _was_not_there(step, storage, request, run, fetch)
    state.count("hidden_fetches_failed")
    cut_run(state, run)
    wake_followers(state, fetch)
    return _end_early(step, request)


def _was_there(step: Step, storage: Storage, request: Request, run: HiddenRun) -> None:
    """Extend the run: the object store had all chunks that it was asked for."""
    step.state.count("store_questions_answered")
    storage.fetching.blanks.note_something(HIDDEN)
    go_on_asking(request, run, step.state.tree.page_size)
    _stop_waiting(step, request)


def _was_not_there(
    step: Step, storage: Storage, request: Request, run: HiddenRun, fetch: HiddenFetch
) -> Request | None:
    """Cut the run: the object store lacked some or all of the chunks. Followers need not ask for them again."""
    state = step.state
    has_come = run.arrived > run.end - fetch.chunks * chunk_tokens(state.tree.page_size)
    if has_come or run.chunks > fetch.chunks:
        state.count("store_questions_answered")
        storage.fetching.blanks.note_something(HIDDEN)
        request.prefetch.lacks.note(HIDDEN, run.arrived)
    else:
        state.count("store_questions_in_vain")
        storage.fetching.blanks.note_nothing(HIDDEN)
        request.prefetch.lacks.note(HIDDEN, run.arrived)
    for name in fetch.followers:
        if name in state.requests:
            state.requests[name].prefetch.lacks.note(HIDDEN, run.arrived)
    cut_run(state, run)
    wake_followers(state, fetch)
    return _go_on_without(step, request)


def _end_early(step: Step, request: Request) -> Request | None:
    """End a fetch that brought less than was ordered. The rest is fetched as KV if possible, or computed."""
    request.hidden.refusals += 1
    return _go_on_without(step, request)


def _go_on_without(step: Step, request: Request) -> Request | None:
    """Expect no more hidden states for a request; return it if it waits and its run is empty."""
    state = step.state
    _stop_waiting(step, request)
    end_run(state, request)
    return request if request.hidden.run is None and request.state is RequestState.WAITING else None


def _stop_waiting(step: Step, request: Request) -> None:
    """Queue a request again that waits for a part of its run."""
    if request.hidden.run is not None and request.wait.fetch:
        wake(step.state, request)
    if request.hidden.run is not None:
        end_fetch_wait(step, request)
        step.touch(request.worker_id)
