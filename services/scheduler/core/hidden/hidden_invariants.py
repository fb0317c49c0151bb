"""Invariants of hidden pools, leases, saves, runs and their fetches, checked from scratch. For tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.prefix_tree import IDENTITY_BYTES, PAGE_NUMBER_BYTES
from services.scheduler.core.hidden.hidden_in_flight import hole_at, next_hidden, page_at
from services.scheduler.core.hidden.hidden_runs import pages_of_runs
from services.scheduler.core.lifecycle import ADMITTED, RequestState
from services.scheduler.core.require import require
from services.scheduler.core.tiers.catalogue import most_chunks
from shared.chunks import chunk_pages, chunk_tokens
from shared.ids import DIGEST_BYTES, TOKEN_BYTES, chain_pages, chain_root, split_digests
from shared.messages.pools import HIDDEN

if TYPE_CHECKING:
    from services.scheduler.core.hidden.hidden_in_flight import HiddenFetch, HiddenRun, HiddenSave, OpenHiddenLease
    from services.scheduler.core.request import Request
    from services.scheduler.core.state import CellState, Storage


def check_hidden(state: CellState) -> None:
    """Raise InvariantViolated if leases, saves, claimed chunks and deadlines contradict one another."""
    for lease in state.leases.values():
        _check_lease(state, lease)
    for save in state.hidden_saves.values():
        _check_save(state, save)
    for storage in state.storages.values():
        _check_storage(state, storage)
    for request in state.requests.values():
        lease_of = state.leases.get(request.hidden.lease)
        is_its = lease_of is not None and lease_of.request_id == request.request_id
        require(not request.hidden.lease or is_its, f"{request.request_id} has a lease that is not its own")


def hidden_pages(state: CellState, storage: Storage) -> list[bytes]:
    """Return the pages of a hidden pool (packed) that are in use, one item for each user. Changes nothing."""
    name = storage.storage_id
    leased = [lease.pages for lease in state.leases.values() if lease.storage_id == name]
    saved = [save.pages for save in state.hidden_saves.values() if save.storage_id == name]
    return [*leased, *saved, pages_of_runs(state, storage)]


def _check_lease(state: CellState, lease: OpenHiddenLease) -> None:
    name = f"hidden lease {lease.lease_id}"
    page_size = state.tree.page_size
    storage, worker = state.storages.get(lease.storage_id), state.workers.get(lease.worker_id)
    require(storage is not None and storage.hidden.pool is not None, f"{name} is of no pool")
    require(worker is not None and storage is not None and worker.node == storage.node, f"{name} is of no worker")
    chunks = _whole_chunks(lease.pages, page_size)
    require(chunks > 0, f"{name} is not of whole chunks")
    require(lease.depth % chunk_tokens(page_size) == 0, f"{name} begins within a chunk")
    require(len(lease.names) // DIGEST_BYTES <= chunks, f"{name} saves more chunks than it has pages")
    request = state.requests.get(lease.request_id)
    if request is None:
        require(not lease.request_id, f"{name} is of a request that is gone")
        timer = state.timers.get(lease.timer_id)
        require(timer is not None and timer.subject == str(lease.lease_id), f"{name} may never end")
        return
    require(request.hidden.lease == lease.lease_id, f"{name} is of a request that has another")
    is_there = request.state in ADMITTED and request.worker_id == lease.worker_id
    require(is_there, f"{name} is of a request that does not run at its worker")
    require(not lease.timer_id, f"{name} has a deadline while its request runs")
    require(
        lease.depth >= (request.hidden.run.goal if request.hidden.run is not None else 0),
        f"{name} saves what is restored",
    )


def _check_save(state: CellState, save: HiddenSave) -> None:
    name = f"save {save.save_id} of hidden states"
    require(save.save_id not in state.saves, f"{name} is one of KV, too")
    storage = state.storages.get(save.storage_id)
    require(storage is not None and storage.hidden.pool is not None, f"{name} is of no pool")
    require(save.is_late != (save.timer_id in state.timers), f"{name} has a wrong deadline")
    chunks = _whole_chunks(save.pages, state.tree.page_size)
    require(0 < chunks == len(save.names) // DIGEST_BYTES, f"{name} has another number of pages")


def _check_storage(state: CellState, storage: Storage) -> None:
    name = storage.storage_id
    require(state.is_configured or not storage.is_pool_requested, f"{name} was asked for a pool without settings")
    require(storage.is_pool_requested or not storage.hidden.is_requested, f"{name} was asked for a hidden pool first")
    require((storage.hidden.pool is None) == (storage.hidden.handle is None), f"{name} has a hidden pool only in part")
    require(storage.hidden.pool is None or storage.hidden.is_requested, f"{name} has an unwanted hidden pool")
    saving: dict[bytes, int] = {}
    for lease in state.leases.values():
        for chunk in split_digests(lease.names) if lease.storage_id == name else ():
            require(chunk not in saving, f"a chunk of hidden lease {lease.lease_id} is saved twice")
            saving[chunk] = lease.lease_id
    for save in state.hidden_saves.values():
        for chunk in split_digests(save.names) if save.storage_id == name else ():
            require(chunk not in saving, f"a chunk of save {save.save_id} is saved twice")
            saving[chunk] = save.lease_id
    require(storage.hidden.saving == saving, f"{name} saves hidden states of other chunks than it thinks")
    most = most_chunks(state, storage, HIDDEN)
    require(len(storage.hidden.chunks) <= most, f"{name} has more hidden chunks than room for them")


def _whole_chunks(pages: bytes, page_size: int) -> int:
    """Return the number of chunks of packed pages; 0 where they are not whole."""
    chunks, rest = divmod(len(pages), chunk_pages(page_size) * PAGE_NUMBER_BYTES)
    return 0 if rest else chunks


def check_runs(state: CellState) -> None:
    """Raise InvariantViolated if runs, their pages and their fetches contradict one another."""
    for request in state.requests.values():
        if request.hidden.run is not None:
            _check_run(state, request, request.hidden.run)
    for fetch in state.hidden_fetches.values():
        _check_fetch(state, fetch)


def check_hidden_wait(state: CellState, request: Request) -> None:
    """Raise InvariantViolated if a request waits for a fetch of hidden states that it neither owns nor follows."""
    fetch = state.hidden_fetches[request.wait.fetch]
    owns = request.hidden.run is not None and request.hidden.run.fetch == fetch.fetch_id
    name = request.request_id
    require(owns or name in fetch.followers, f"{name} waits for hidden states that are not for it")
    require(bool(fetch.request_id), f"{name} waits for hidden states that restore no request")


def _check_run(state: CellState, request: Request, run: HiddenRun) -> None:
    name = request.request_id
    page_size = state.tree.page_size
    storage = state.storages.get(run.storage_id)
    require(storage is not None and storage.hidden.pool is not None, f"{name} is restored from no pool")
    is_at_worker = request.state in ADMITTED or (request.state is RequestState.WAITING and bool(request.worker_id))
    require(is_at_worker, f"{name} has hidden states and no worker")
    is_ordered = run.depth <= run.arrived <= run.end <= run.goal <= request.token_count - 1
    require(is_ordered, f"the run of {name} is out of order")
    pages = page_at(run, run.end, page_size)
    require(len(run.pages) == pages * PAGE_NUMBER_BYTES, f"the run of {name} has another number of pages")
    require(len(run.identities) == pages * IDENTITY_BYTES, f"the run of {name} has another number of identities")
    require(not run.end % chunk_tokens(page_size), f"the run of {name} ends within a chunk")
    _check_holes(name, run, chunk_tokens(page_size))
    root, tokens = chain_root(request.submit.namespace), request.tokens[: run.end * TOKEN_BYTES]
    chain = split_digests(chain_pages(root, tokens, state.tree.page_token_bytes))
    held = [
        identity
        for page, identity in enumerate(chain)
        if page * page_size >= run.depth and hole_at(run, page * page_size) is None
    ]
    require(b"".join(held) == run.identities, f"the run of {name} is of other tokens")
    fetch = state.hidden_fetches.get(run.fetch)
    is_its = fetch is not None and fetch.request_id == name
    require(not run.fetch or is_its, f"the run of {name} is fetched for none")
    require(bool(run.fetch) or run.arrived == run.end, f"the rest of the run of {name} never comes")
    is_open = run.further == "asked" and not (run.fetch and run.goal == run.end)
    require(not is_open, f"{name} waits for an answer that does not come, or counts on it")
    is_left = bool(run.fetch) or run.end > run.depth or run.goal > run.end
    require(is_left, f"{name} keeps a run without anything left")
    if request.state in ADMITTED and not request.is_poisoned:
        # Tokens behind a run that has arrived whole are computed, even before its fetch is reported as over.
        has_all = not run.fetch or run.arrived == run.end
        is_there = has_all or request.planned <= next_hidden(run, run.arrived)
        require(is_there, f"{name} was to be restored from what has not arrived")
        require(run.depth <= request.computed, f"{name} gave back hidden states that it was not restored from")
        is_moving = bool(run.fetch) or request.computed < next_hidden(run, run.end) or request.planned >= run.goal
        is_leaving = request.state in (RequestState.PREEMPTING, RequestState.ABORTING)  # Then nothing more is fetched.
        require(is_moving or is_leaving, f"{name} waits for hidden states that are not fetched")


def _check_holes(name: str, run: HiddenRun, size: int) -> None:
    end = -1  # A hole may begin with the first token; hidden states lie between two of them and behind the last.
    for hole in run.holes:
        require(end < hole.start < hole.end < run.goal, f"a hole of the run of {name} is out of order")
        is_whole = not hole.start % size and not hole.end % size
        require(is_whole and run.depth < hole.end, f"a hole of the run of {name} is no hole")
        end = hole.end


def _check_fetch(state: CellState, fetch: HiddenFetch) -> None:
    name = f"hidden fetch {fetch.fetch_id}"
    require(fetch.fetch_id not in state.fetches, f"{name} has the number of a fetch of KV")
    require(fetch.storage_id in state.storages, f"{name} has no storage")
    request = state.requests.get(fetch.request_id)
    if fetch.request_id:
        owns = request is not None and request.hidden.run is not None and request.hidden.run.fetch == fetch.fetch_id
        require(owns, f"{name} is for no request")
        require(not fetch.pages, f"{name} keeps pages of a request that has them")
    else:
        most = fetch.chunks * chunk_pages(state.tree.page_size) * PAGE_NUMBER_BYTES
        require(len(fetch.pages) <= most, f"{name} keeps more pages than it was given")
        require(fetch.is_called_off, f"{name} goes on for no request")
    timer = state.timers.get(fetch.timer_id)
    require((timer is None) == fetch.is_called_off, f"{name} has no deadline, or keeps one")
