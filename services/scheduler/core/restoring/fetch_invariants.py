"""Invariants of fetches, catalogues and the requests that wait for fetches, checked from scratch. For tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.prefix_tree import PAGE_NUMBER_BYTES
from services.scheduler.core.hidden.hidden_invariants import check_hidden_wait, check_runs
from services.scheduler.core.lifecycle import RequestState
from services.scheduler.core.require import require
from services.scheduler.core.tiers.catalogue import most_chunks
from services.scheduler.core.tiers.under_way import NOWHERE, leased_pages
from shared.chunks import chunk_pages, chunk_tokens
from shared.ids import DIGEST_BYTES, TOKEN_BYTES, split_digests
from shared.messages.base import pack_int32, unpack_int32

if TYPE_CHECKING:
    from services.scheduler.core.request import Request
    from services.scheduler.core.state import CellState, Storage
    from services.scheduler.core.tiers.under_way import Fetch


def check_fetches(state: CellState) -> None:
    """Raise InvariantViolated if fetches, their pages, their chunks and their waiters contradict one another."""
    require(not state.unwanted and not state.roomy, "something of this step was left for the next")
    for fetch in state.fetches.values():
        _check_fetch(state, fetch)
    for storage in state.storages.values():
        _check_storage(state, storage)
    for request in state.requests.values():
        _check_request(state, request)
    check_runs(state)


def pages_of_fetches(state: CellState, storage: Storage) -> bytes:
    """Return the host pages that fetches of this storage lease (packed). Changes nothing."""
    held = [fetch.pages for fetch in state.fetches.values() if fetch.storage_id == storage.storage_id]
    return pack_int32([page for page in unpack_int32(b"".join(held)) if page != NOWHERE])


def _check_fetch(state: CellState, fetch: Fetch) -> None:
    name = f"fetch {fetch.fetch_id}"
    page_size = state.tree.page_size
    chunks = len(fetch.names) // DIGEST_BYTES
    require(fetch.storage_id in state.storages, f"{name} has no storage")
    require(
        len(fetch.pages) == chunks * chunk_pages(page_size) * PAGE_NUMBER_BYTES, f"{name} has another number of pages"
    )
    end = fetch.depth + chunks * chunk_tokens(page_size)
    require(len(fetch.tokens) == end * TOKEN_BYTES, f"{name} has another number of tokens")
    inserted = fetch.chunks * chunk_pages(page_size)
    require(leased_pages(fetch.pages[: inserted * PAGE_NUMBER_BYTES]) == 0, f"{name} leases what is in the tree")
    if fetch.is_called_off:
        require(not fetch.waiters, f"a request waits for {name}, which was cut off")
    else:
        timer = state.timers.get(fetch.timer_id)
        require(timer is not None and timer.subject == str(fetch.fetch_id), f"{name} has no deadline")
        is_for_somebody = bool(fetch.waiters) or fetch.is_warming
        require(is_for_somebody or fetch.chunks == chunks, f"no request waits for {name}")
    require(not fetch.is_called_off or fetch.timer_id not in state.timers, f"{name} keeps a deadline")
    for request_id in fetch.waiters:
        request = state.requests.get(request_id)
        require(request is not None and request.prefetch.fetch == fetch.fetch_id, f"{request_id} does not want {name}")


def _check_storage(state: CellState, storage: Storage) -> None:
    name = storage.storage_id
    own = [fetch for fetch in state.fetches.values() if fetch.storage_id == name]
    require(storage.fetching.pages == sum(leased_pages(fetch.pages) for fetch in own), f"{name} miscounts its fetches")
    own_hidden = [fetch for fetch in state.hidden_fetches.values() if fetch.storage_id == name]
    late = sum(fetch.is_late for fetch in own) + sum(fetch.is_late for fetch in own_hidden)
    require(storage.fetching.late == late, f"{name} miscounts its late fetches")
    coming: dict[bytes, int] = {}
    for fetch in own:
        for chunk in () if fetch.is_called_off else split_digests(fetch.names):
            require(chunk not in coming, f"a chunk of {name} is fetched twice")
            coming[chunk] = fetch.fetch_id
    require(storage.fetching.chunks == coming, f"{name} fetches other chunks than it thinks")
    require(len(storage.disk.chunks) <= most_chunks(state, storage), f"{name} has more chunks than room for them")
    for request_id in (*storage.fetching.due, *storage.fetching.ahead, *storage.fetching.held):
        request = state.requests.get(request_id)
        is_waiting = request is not None and request.state is RequestState.WAITING
        require(is_waiting, f"{name} keeps room for {request_id}, which does not wait")
        is_due = request is not None and request.prefetch.is_due
        require(
            request_id not in storage.fetching.due or is_due, f"{request_id} waits for room and has nothing to fetch"
        )
    require(not own or storage.pool is not None, f"{name} fetches into no pool")


def _check_request(state: CellState, request: Request) -> None:
    name = request.request_id
    if request.prefetch.fetch:
        fetch = state.fetches.get(request.prefetch.fetch)
        require(fetch is not None and name in fetch.waiters, f"{name} wants a fetch that is not for it")
        require(request.state is RequestState.WAITING and bool(request.worker_id), f"{name} wants KV and does not wait")
        if fetch is not None:
            storage = state.storages[fetch.storage_id]
            is_near = storage.node == state.workers[request.worker_id].node
            require(is_near or bool(storage.shares), f"{name} waits for a fetch whose pages it cannot read")
            shared = fetch.tokens[: request.prefetch.end * TOKEN_BYTES]
            require(request.tokens.startswith(shared), f"{name} wants other tokens than are fetched for it")
    if request.wait.fetch in state.hidden_fetches:
        check_hidden_wait(state, request)
    else:
        require(request.wait.fetch in (0, request.prefetch.fetch), f"{name} waits for another fetch than it wants")
    if request.state is not RequestState.WAITING:
        is_past = not (request.patience.fetch_timer or request.patience.is_fetch_over or request.prefetch.brought_to)
        is_past &= not request.prefetch.looks_again
        require(is_past, f"{name} does not wait and remembers a fetch")
