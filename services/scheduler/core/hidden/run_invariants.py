"""What must hold of runs of state and of the fetches that bring them, checked from scratch. For tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.prefix_tree import IDENTITY_BYTES, PAGE_NUMBER_BYTES, TOKEN_BYTES
from services.scheduler.core.hidden.stretches import hole_at, next_hidden, page_at
from services.scheduler.core.lifecycle import ADMITTED, RequestState
from shared.chunks import chunk_pages, chunk_tokens
from shared.errors import InvariantViolated
from shared.ids import chain_pages, chain_root, split_digests

if TYPE_CHECKING:
    from services.scheduler.core.hidden.hidden_in_flight import HiddenFetch, HiddenRun
    from services.scheduler.core.request import Request
    from services.scheduler.core.state import CellState


def check_runs(state: CellState) -> None:
    """Raise InvariantViolated if runs, their pages and their fetches contradict one another."""
    for request in state.requests.values():
        if request.run is not None:
            _check_run(state, request, request.run)
    for fetch in state.hidden_fetches.values():
        _check_fetch(state, fetch)


def check_hidden_wait(state: CellState, request: Request) -> None:
    """Who waits for a fetch of state owns its run, or shares what it brings with the one who does."""
    fetch = state.hidden_fetches[request.waits_fetch]
    owns = request.run is not None and request.run.fetch == fetch.fetch_id
    name = request.request_id
    _require(owns or name in fetch.followers, f"{name} waits for state that is not for it")
    _require(bool(fetch.request_id), f"{name} waits for state that nobody is to be restored from")


def _check_run(state: CellState, request: Request, run: HiddenRun) -> None:
    name = request.request_id
    page_size = state.tree.page_size
    storage = state.storages.get(run.storage_id)
    _require(storage is not None and storage.hidden_pool is not None, f"{name} is restored from no pool")
    is_at_worker = request.state in ADMITTED or (request.state is RequestState.WAITING and bool(request.worker_id))
    _require(is_at_worker, f"{name} has state and no worker")
    is_ordered = run.depth <= run.arrived <= run.end <= run.goal <= request.token_count - 1
    _require(is_ordered, f"the run of {name} is out of order")
    pages = page_at(run, run.end, page_size)
    _require(len(run.pages) == pages * PAGE_NUMBER_BYTES, f"the run of {name} has another number of pages")
    _require(len(run.identities) == pages * IDENTITY_BYTES, f"the run of {name} has another number of identities")
    _require(not run.end % chunk_tokens(page_size), f"the run of {name} ends within a chunk")
    _check_holes(name, run, chunk_tokens(page_size))
    root, tokens = chain_root(request.submit.namespace), request.tokens[: run.end * TOKEN_BYTES]
    chain = split_digests(chain_pages(root, tokens, state.tree.page_token_bytes))
    held = [
        identity
        for page, identity in enumerate(chain)
        if page * page_size >= run.depth and hole_at(run, page * page_size) is None
    ]
    _require(b"".join(held) == run.identities, f"the run of {name} is of other tokens")
    fetch = state.hidden_fetches.get(run.fetch)
    is_its = fetch is not None and fetch.request_id == name
    _require(not run.fetch or is_its, f"the run of {name} is fetched for none")
    _require(bool(run.fetch) or run.arrived == run.end, f"the rest of the run of {name} never comes")
    is_open = run.further == "asked" and not (run.fetch and run.goal == run.end)
    _require(not is_open, f"{name} waits for an answer that does not come, or counts on it")
    is_left = bool(run.fetch) or run.end > run.depth or run.goal > run.end
    _require(is_left, f"{name} keeps a run of which nothing is left")
    if request.state in ADMITTED and not request.is_poisoned:
        is_there = request.planned <= next_hidden(run, run.arrived) or not run.fetch
        _require(is_there, f"{name} was to be restored from what has not arrived")
        _require(run.depth <= request.computed, f"{name} gave back state that it was not restored from")
        is_moving = bool(run.fetch) or request.computed < next_hidden(run, run.end) or request.planned >= run.goal
        is_leaving = request.state in (RequestState.PREEMPTING, RequestState.ABORTING)  # Then nothing more is fetched.
        _require(is_moving or is_leaving, f"{name} waits for state that nobody fetches")


def _check_holes(name: str, run: HiddenRun, size: int) -> None:
    end = -1  # A hole may begin with the first token; state lies between two of them and behind the last.
    for hole in run.holes:
        _require(end < hole.start < hole.end < run.goal, f"a hole of the run of {name} is out of order")
        is_whole = not hole.start % size and not hole.end % size
        _require(is_whole and run.depth < hole.end, f"a hole of the run of {name} is no hole")
        end = hole.end


def _check_fetch(state: CellState, fetch: HiddenFetch) -> None:
    name = f"state fetch {fetch.fetch_id}"
    _require(fetch.fetch_id not in state.fetches, f"{name} has the number of a fetch of KV")
    _require(fetch.storage_id in state.storages, f"{name} has no storage")
    request = state.requests.get(fetch.request_id)
    if fetch.request_id:
        owns = request is not None and request.run is not None and request.run.fetch == fetch.fetch_id
        _require(owns, f"{name} is for nobody")
        _require(not fetch.pages, f"{name} keeps pages of a request that has them")
    else:
        most = fetch.chunks * chunk_pages(state.tree.page_size) * PAGE_NUMBER_BYTES
        _require(len(fetch.pages) <= most, f"{name} keeps more pages than it was given")
        _require(fetch.is_cancelled, f"{name} goes on for nobody")
    timer = state.timers.get(fetch.timer_id)
    _require((timer is None) == fetch.is_cancelled, f"{name} has no deadline, or keeps one")


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise InvariantViolated(text)
