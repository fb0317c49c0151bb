"""Runs: hidden states of a waiting request's next tokens, ordered into a storage's hidden pool (HCache 4.2).

Nothing of a run enters the tree or is shared: the pages are there only until the worker has restored KV from them. A
run's pages are its request's, except those that a fetch may still write to once the request has no use for them: they
stay with the fetch until the storage says that it is over, and then they are free. So each is given back once.

A run may have holes (:mod:`hidden_in_flight`). There is one fetch of it at a time, of one stretch at most; the next
begins when that is over, so that the disk works while arrived chunks are restored and holes are computed.

A run may be a question (:mod:`restoration_ways`): it is unknown whether the object store has any of it. Once the chunks
that it asked for came whole, those that follow are taken to be there as well, and the run ends where they turn out not
to be.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.prefix_tree import IDENTITY_BYTES, PAGE_NUMBER_BYTES
from services.scheduler.core.hidden.hidden_in_flight import (
    HIDDEN_FETCH_CHUNKS,
    Further,
    HiddenFetch,
    HiddenRun,
    Stretch,
    end_at,
    holes_between,
    identity_before,
    next_hidden,
    page_at,
    stretch_end,
)
from services.scheduler.core.lifecycle import RequestState
from services.scheduler.core.rates import queued_bytes
from services.scheduler.core.waiting.waits import wake
from shared.chunks import chunk_pages, chunk_tokens
from shared.ids import TOKEN_BYTES, chain_pages
from shared.messages.pools import HIDDEN
from shared.messages.storage_plans import FetchChunks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.scheduler.core.cache.identities import ChunkNames
    from services.scheduler.core.request import Request
    from services.scheduler.core.restoring.restoration_choice import Choice
    from services.scheduler.core.state import CellState, Storage
    from services.scheduler.core.step import Step


def room_for_hidden(storage: Storage, request: Request, pages_each: int) -> int:
    """Return how many chunks a request may fetch now: into free pages, and at most half of the pool for one request."""
    pool = storage.hidden.pool
    if pool is None:
        return 0
    held = len(request.hidden.run.pages) // PAGE_NUMBER_BYTES if request.hidden.run is not None else 0
    return max(0, min(pool.free, pool.total // 2 - held)) // pages_each


def begin_run(
    step: Step,
    request: Request,
    storage: Storage,
    names: ChunkNames,
    first: int,
    end: int,
    choice: Choice,
    *,
    later: Sequence[Stretch] = (),
    further: Further = "disk",
) -> bool:
    """Order chunks [first, end) of a request's hidden states, as many as there is room for; return False without room.

    The others follow as the pages of the first come back, and then stretches ``later``, with holes between them. Where
    ``end`` is ``first``, the first hole begins there. A question (``further`` is "asked") is of no more than is ordered
    at once.
    """
    state = step.state
    each, page_size = names.pages_each, state.tree.page_size
    stretches = [(first, end), *later] if end > first else later
    begin, end = stretches[0]
    room = room_for_hidden(storage, request, each)
    chunks = min(end - begin, HIDDEN_FETCH_CHUNKS, room)
    pages = storage.hidden.pool.allocate(chunks * each) if storage.hidden.pool is not None and chunks > 0 else None
    if pages is None:
        state.count("hidden_runs_without_room")
        return False
    depth = first * each * page_size
    request.hidden.run = HiddenRun(
        storage_id=storage.storage_id,
        fetch=0,
        depth=depth,
        end=depth,
        arrived=depth,
        pages=b"",
        identities=b"",
        recomputed=choice.recomputed,
        kind=choice.kind,
        predicted_us=choice.restoring_us,
        began_ns=step.time_ns,
        goal=(begin + chunks if further == "asked" else stretches[-1][1]) * each * page_size,
        further=further,
        holes=holes_between(names, first, stretches, page_size, request.submit.namespace),
    )
    identities = names.identities(begin * each, (begin + chunks) * each)
    _order(step, request, request.hidden.run, storage, pages, identities)
    state.count("hidden_runs")
    state.count("hidden_holes_planned", len(request.hidden.run.holes))
    return True


def extend_run(step: Step, request: Request) -> None:
    """Fetch the next part of a run whose last fetch is over, as far as the disk has it and there is room.

    Where none can be had, and nothing of the run is left that would make room, the rest is computed.
    """
    run = request.hidden.run
    start = next_hidden(run, run.end) if run is not None else 0
    if run is None or run.fetch or request.planned > start:  # The next tokens are being computed already.
        return
    if _order_more(step, request, run):
        step.state.count("hidden_runs_extended")
    elif request.state is RequestState.PREFILLING and request.computed == start and run.end < run.goal:
        end_at(run, run.end)
        run.predicted_us = 0.0


def _order_more(step: Step, request: Request, run: HiddenRun) -> bool:
    """Order the next part of a run; return whether there was any.

    The run ends at the latest where the request's own hidden lease begins.
    """
    state = step.state
    storage = state.storages.get(run.storage_id)
    is_going_on = request.state in (RequestState.WAITING, RequestState.PREFILLING) and not request.is_poisoned
    if storage is None or storage.fetching.late or request.hidden.refusals or not is_going_on:
        return False
    tree = state.tree
    each, size = chunk_pages(tree.page_size), chunk_tokens(tree.page_size)
    limit = run.goal if run.further == "goal" else request.token_count - 1
    lease = state.leases.get(request.hidden.lease)
    if lease is not None:
        limit = min(limit, lease.depth)
    start = next_hidden(run, run.end)
    limit = stretch_end(run, start, limit)
    chunks = min((limit - start) // size, HIDDEN_FETCH_CHUNKS, room_for_hidden(storage, request, each))
    if chunks < 1:
        return False
    identities = _known_part(state, storage, request, run, chunks)
    pages = storage.hidden.pool.allocate(len(identities) // IDENTITY_BYTES) if storage.hidden.pool is not None else None
    if not pages:
        return False
    _order(step, request, run, storage, pages, identities)
    if run.end > run.goal:
        run.goal, run.predicted_us = run.end, 0.0  # The run is longer than the predicted one.
    return True


def _known_part(state: CellState, storage: Storage, request: Request, run: HiddenRun, chunks: int) -> bytes:
    """Return the identities of the next pages of a run, up to the first of ``chunks`` chunks that cannot be had."""
    tree, tokens, found = state.tree, request.tokens, b""
    size, begin = chunk_tokens(tree.page_size), next_hidden(run, run.end)
    for start in range(begin, begin + chunks * size, size):
        above = found[-IDENTITY_BYTES:] or identity_before(run)
        chunk = chain_pages(above, tokens[start * TOKEN_BYTES : (start + size) * TOKEN_BYTES], tree.page_token_bytes)
        if run.further != "store" and chunk[-IDENTITY_BYTES:] not in storage.hidden.chunks:
            break
        found += chunk
    return found


def _order(step: Step, request: Request, run: HiddenRun, storage: Storage, pages: bytes, identities: bytes) -> None:
    """Append pages to a run and order their fetch. A hole before them counts as arrived."""
    state = step.state
    fetch_id = state.next_fetch
    state.next_fetch += 1
    page_size, deadline_ms = state.tree.page_size, state.config.fetch_deadline_ms
    fetched = len(pages) // PAGE_NUMBER_BYTES
    queued = queued_bytes(state, storage)
    state.count("hidden_holes_passed", int(next_hidden(run, run.end) > run.end))
    run.end = next_hidden(run, run.end)
    run.arrived = run.end
    order = FetchChunks(
        fetch_id=fetch_id,
        namespace=request.submit.namespace,
        depth=run.end,
        identities=identities,
        host_pages=pages,
        deadline_ms=deadline_ms,
        key_id=request.submit.key_id,
        form=HIDDEN,
        trace=request.submit.trace,
        quota=state.quotas.disk_quota(state.tree.owner_of(request.submit.namespace)),
    )
    run.fetch = fetch_id
    run.end += fetched * page_size
    run.pages += pages
    run.identities += identities
    run.chunks += fetched // chunk_pages(page_size)
    state.hidden_fetches[fetch_id] = HiddenFetch(
        fetch_id=fetch_id,
        storage_id=storage.storage_id,
        request_id=request.request_id,
        timer_id=step.set_timer(f"fetch.{fetch_id}", "hidden_fetch", str(fetch_id), deadline_ms),
        chunks=fetched // chunk_pages(page_size),
        queued_bytes=queued,
        is_question=run.further in ("asked", "store"),
    )
    state.count("hidden_fetches_started")
    step.to_storage(storage, order)


def go_on_asking(request: Request, run: HiddenRun, page_size: int) -> None:
    """Raise a run's goal by up to one fetch, as the object store had all chunks that it was asked for."""
    size = chunk_tokens(page_size)
    last = (request.token_count - 1) // size * size
    run.further = "store"
    run.goal = max(run.goal, min(last, run.end + HIDDEN_FETCH_CHUNKS * size))


def is_unanswered(run: HiddenRun) -> bool:
    """Return whether a run's end is unknown until the object store answers. Changes nothing."""
    return run.further == "asked" and bool(run.fetch)


def drop_run(state: CellState, request: Request) -> None:
    """Drop the run of a request that is restored by other means, or not at all.

    A running fetch is cancelled at the end of the step.
    """
    run, request.hidden.run = request.hidden.run, None
    if run is None:
        return
    fetch = state.hidden_fetches.get(run.fetch)
    if fetch is not None:
        _leave_to(state, run, fetch)
        state.unwanted[fetch.fetch_id] = None
        wake_followers(state, fetch)
    free_pages(state, run.storage_id, run.pages)


def cut_run(state: CellState, run: HiddenRun) -> None:
    """End a run at its last arrived token; nothing more of it is fetched, whether or not its fetch is over."""
    fetch = state.hidden_fetches.get(run.fetch)
    if fetch is not None:
        _leave_to(state, run, fetch)
    kept = page_at(run, run.arrived, state.tree.page_size)
    free_pages(state, run.storage_id, run.pages[kept * PAGE_NUMBER_BYTES :])
    run.pages, run.identities = run.pages[: kept * PAGE_NUMBER_BYTES], run.identities[: kept * IDENTITY_BYTES]
    end_at(run, run.arrived)
    run.arrived = run.end
    run.fetch, run.predicted_us = 0, 0.0
    run.further = "goal" if run.further in ("asked", "store") else run.further


def _leave_to(state: CellState, run: HiddenRun, fetch: HiddenFetch) -> None:
    """Leave the pages that have not arrived to the fetch, which may still write to them."""
    kept = page_at(run, run.arrived, state.tree.page_size) * PAGE_NUMBER_BYTES
    fetch.pages, run.pages = run.pages[kept:], run.pages[:kept]
    fetch.request_id = ""
    run.fetch = 0


def free_restored(state: CellState, request: Request) -> None:
    """Free the pages of a run whose tokens were restored."""
    run = request.hidden.run
    if run is None:
        return
    reached = max(run.depth, min(request.computed, run.end))
    done = page_at(run, reached, state.tree.page_size)
    free_pages(state, run.storage_id, run.pages[: done * PAGE_NUMBER_BYTES])
    if done:
        run.above = run.identities[(done - 1) * IDENTITY_BYTES : done * IDENTITY_BYTES]
    run.pages, run.identities = run.pages[done * PAGE_NUMBER_BYTES :], run.identities[done * IDENTITY_BYTES :]
    run.depth = reached
    run.holes = [hole for hole in run.holes if hole.end > reached]


def wake_followers(state: CellState, fetch: HiddenFetch) -> None:
    """Wake all requests that wait for a part of this fetch."""
    for name in fetch.followers:
        request = state.requests.get(name)
        if request is not None and request.wait.fetch == fetch.fetch_id:
            wake(state, request)


def run_with(state: CellState, request: Request, name: bytes, end: int) -> HiddenFetch | None:
    """Return a fetch of hidden states for another request at the same worker that brings the chunk ``name``, or None.

    ``end`` is where that chunk ends, in tokens. Changes nothing.
    """
    for fetch in state.hidden_fetches.values():
        other = state.requests.get(fetch.request_id)
        if other is None or other is request or other.hidden.run is None or other.state is not RequestState.WAITING:
            continue
        place = page_at(other.hidden.run, end, state.tree.page_size) * IDENTITY_BYTES
        is_same = place > 0 and other.hidden.run.identities[place - IDENTITY_BYTES : place] == name
        if is_same and other.worker_id == request.worker_id:
            return fetch
    return None


def free_pages(state: CellState, storage_id: str, pages: bytes) -> None:
    """Free pages of a hidden pool, if the pool still exists."""
    storage = state.storages.get(storage_id)
    if storage is not None and storage.hidden.pool is not None:
        storage.hidden.pool.release(pages)


def pages_of_runs(state: CellState, storage: Storage) -> bytes:
    """Return the hidden pages that runs and fetches of this storage hold (packed). Changes nothing."""
    held = [
        request.hidden.run.pages
        for request in state.requests.values()
        if request.hidden.run is not None and request.hidden.run.storage_id == storage.storage_id
    ]
    held += [fetch.pages for fetch in state.hidden_fetches.values() if fetch.storage_id == storage.storage_id]
    return b"".join(held)
