"""What a waiting request has fetched for it from below host memory, ahead of its turn (Strata 4.2).

A request's prompt may go on in the chunks of its node's storage where the tree knows nothing of it any more. The run
of whole chunks that follows what its worker can reuse is ordered into leased host pages when the request is queued,
or is among the first of a long queue, so that the disk works while the request waits; :mod:`fetches` takes over what
arrives, and the request is matched against it as against any other host copy. Where a chunk is on its way for
somebody else already, the request shares that fetch. Fetches that are not over, and what they brought for requests
that still wait, have ``prefetch_fraction`` of the pool at the most, or one request's KV: more would be evicted before
its turn. Who finds no room is served in order of arrival as it comes free.

Where the disk has state of what follows, beside its KV or in its place, :mod:`restoration_choice` says which of them
to fetch, or that computing is faster than either; ``restoring`` may settle that.

Of the object store nothing is known beforehand. It is asked for a few chunks at first and for as many as one fetch
may bring once those came, so that a prompt that nobody has seen displaces few host copies for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.scheduler.core.catalogue import has_lower_tiers
from services.scheduler.core.chunk_run import ChunkNames, usable_pages
from services.scheduler.core.host_admission import take_host_pages
from services.scheduler.core.placement import tokens_coming
from services.scheduler.core.prefix_tree import PAGE_BYTES, TOKEN_BYTES, Path
from services.scheduler.core.reach import matched_path, may_reuse, reach
from services.scheduler.core.residency import host_pool, lock_host, unlock_host
from services.scheduler.core.restoration_choice import Choice, queued_bytes
from services.scheduler.core.restoration_ways import choose_way, usable_state_end
from services.scheduler.core.state import CellState, Fetch, Request, Storage, Worker, count, storage_of
from services.scheduler.core.state_runs import begin_run, run_with
from services.scheduler.core.turn import Turn
from shared.messages.base import pack_int32, unpack_int32
from shared.messages.storage_plans import FetchChunks

FETCH_CHUNKS = 256
"""Chunks of one fetch at the most. Bounds the size of its order and what one request takes of the pool at once."""

PROBED_CHUNKS = 16
"""Chunks that an object store is asked for before it has proved to hold any of the sequence."""

NEAR = 16
"""Requests of a worker's queue that may have something fetched: what comes early is evicted again before its turn."""

_STARTS_AT_ONCE = 8
"""Requests for which a step that frees room begins fetches at the most: bounds its time."""

NOWHERE = -1
"""Stands in a fetch's pages where the tree has the KV already."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Chunks [first, end) of a sequence, and the leading pages that need not be brought."""

    names: ChunkNames
    first: int
    end: int
    covered_pages: int
    predicted_us: float = 0.0  # Until it is on the device; 0 where nobody can say.


def prefetch_when_near(turn: Turn, request: Request) -> None:
    """A request was queued: prefetch for it now or, where many stand before it, when it is among the first."""
    state = turn.state
    worker = state.workers[request.worker_id]
    if worker.queue.size <= NEAR:
        prefetch(turn, request)
    else:
        storage = storage_of(state, worker)
        request.is_fetch_due = storage is not None and (storage.disk_bytes > 0 or storage.has_remote)


def prefetch_for_first(turn: Turn, worker: Worker, names: Sequence[str]) -> None:
    """These requests are the first in a worker's line: begin what was put off for them."""
    state = turn.state
    storage = storage_of(state, worker)
    if storage is None or not has_lower_tiers(storage):
        return
    for name in names:
        if state.requests[name].is_fetch_due and name not in storage.due:
            prefetch(turn, state.requests[name])


def prefetch(turn: Turn, request: Request, *, is_next: bool = False) -> None:
    """Begin or join a fetch for a request that waits at a worker, if there is something to fetch.

    ``is_next`` says that it would run now: it waits neither for another's computation nor behind other fetches.
    """
    state = turn.state
    request.is_fetch_due = False
    worker = state.workers[request.worker_id]
    storage = storage_of(state, worker)
    is_possible = may_reuse(request) and state.config.restoring != "recompute"
    if storage is None or not has_lower_tiers(storage) or storage.late_fetches or not is_possible:
        for other in state.storages.values():
            other.due.pop(request.request_id, None)
        return  # One that let a deadline pass is asked for nothing until it answers.
    has_room = _try(turn, request, worker, storage, is_next=is_next)
    if has_room:
        storage.due.pop(request.request_id, None)
    else:
        request.is_fetch_due = True
        storage.due[request.request_id] = None  # It keeps its place if it stood there.


def begin_due(turn: Turn) -> None:
    """Room came free: begin the fetches that waited for it."""
    state = turn.state
    for storage_id in list(state.roomy):
        storage = state.storages.get(storage_id)
        for name in list(storage.due)[:_STARTS_AT_ONCE] if storage is not None else ():
            prefetch(turn, state.requests[name])
            if state.requests[name].is_fetch_due:
                break
    state.roomy.clear()


def _try(turn: Turn, request: Request, worker: Worker, storage: Storage, *, is_next: bool) -> bool:
    """Begin or join a fetch if there is something to fetch now; False if there is and it has no room."""
    state = turn.state
    tokens, tree = request.tokens, state.tree
    most_pages = usable_pages(tree, tokens)
    path = matched_path(state, request)
    covered = _covered_pages(state, path, worker)
    names = ChunkNames(tree, request.submit.namespace, tokens, path, most_pages)
    first = covered // names.pages_each
    page_size = tree.page_size
    if first >= names.count or covered * page_size < request.fetched_to:  # What came and went is not fetched again.
        return True
    if request.run is not None:  # What follows its state is computed.
        return True
    if not is_next and _is_being_computed(state, request, worker, covered * page_size):
        request.is_fetch_due = True  # What follows that has nothing to stand on yet.
        return True
    end_of_state = _end_of_state(state, request, worker, storage, names, first, covered)
    shared_fetch = storage.fetching.get(names[first])
    if shared_fetch is not None and not (end_of_state > first and state.config.restoring == "state"):
        _join(state, request, storage, shared_fetch, names, first)
        request.fetched_from = request.fetched_from if request.fetched_to else covered * page_size
        return True
    end = _end_of_run(storage, names, first, is_proven=request.fetched_to > 0)
    run = _Run(names, first, end, covered)
    choice = _chosen(turn, request, worker, storage, run, end_of_state, is_next=is_next)
    if choice.form != "kv" or (end * names.pages_each - covered) * page_size < state.config.min_prefetch_tokens:
        return True
    is_behind = bool(storage.due) and next(iter(storage.due)) != request.request_id
    if is_behind and not is_next and not request.fetched_to:
        return False
    return _begin(turn, request, storage, path, replace(run, predicted_us=choice.restoring_us))


def let_go_of_fetch(state: CellState, request: Request) -> None:
    """A request waits for nothing to be fetched any more; a fetch that nobody waits for then ends with the step."""
    if request.is_fetch_due or request.fetched_to:
        for storage in state.storages.values():
            storage.due.pop(request.request_id, None)
            if storage.ahead.pop(request.request_id, 0) and storage.due:
                state.roomy[storage.storage_id] = None
    request.is_fetch_due = False
    fetch = state.fetches.get(request.fetch)
    request.fetch = request.fetch_end = 0
    if fetch is not None:
        del fetch.waiters[request.request_id]
        if not fetch.waiters and not fetch.is_cancelled:
            state.unwanted[fetch.fetch_id] = None


def _covered_pages(state: CellState, path: Path, worker: Worker) -> int:
    """Leading pages that the worker has, is about to have, or can load."""
    loading = {node.id: None for node, _ in path if worker.worker_id in node.loading}
    return reach(state, path, worker, loading).pages


def _is_being_computed(state: CellState, request: Request, worker: Worker, covered_tokens: int) -> bool:
    """Whether the request will be deferred for another that brings what comes first (see :mod:`deferral`)."""
    coming = tokens_coming(state, request).get(worker.worker_id, 0)
    return 0 < state.config.defer_tokens < coming - covered_tokens


def _end_of_run(storage: Storage, names: ChunkNames, first: int, *, is_proven: bool) -> int:
    """Behind the last chunk that is worth ordering: what the catalogue has, then what the object store may have."""
    most = min(names.count, first + FETCH_CHUNKS)
    end = first
    while end < most and names[end] in storage.chunks and names[end] not in storage.fetching:
        end += 1
    if storage.has_remote:
        most = most if is_proven else min(most, end + PROBED_CHUNKS)
        while end < most and names[end] not in storage.fetching:
            end += 1
    return end


def _join(state: CellState, request: Request, storage: Storage, fetch_id: int, names: ChunkNames, first: int) -> None:
    """Share the fetch that brings a request's next chunk, as far as it brings the same."""
    end = first + 1
    while end < names.count and storage.fetching.get(names[end]) == fetch_id:
        end += 1
    state.fetches[fetch_id].waiters[request.request_id] = None
    request.fetch, request.fetch_end = fetch_id, end * names.pages_each * state.tree.page_size
    count(state, "fetches_shared")


def _end_of_state(
    state: CellState,
    request: Request,
    worker: Worker,
    storage: Storage,
    names: ChunkNames,
    first: int,
    covered: int,
) -> int:
    """Behind the last chunk of state that is worth ordering; ``first`` where there are too few."""
    end = usable_state_end(state, request, worker, storage, names, first)
    is_worth_it = (end * names.pages_each - covered) * state.tree.page_size >= state.config.min_prefetch_tokens
    return end if is_worth_it else first


def _chosen(
    turn: Turn,
    request: Request,
    worker: Worker,
    storage: Storage,
    run: _Run,
    end_of_state: int,
    *,
    is_next: bool,
) -> Choice:
    """How a request's next chunks come back. What is to come from state is ordered; ``kv`` is left to the caller.

    Where state has no room, the best of the other ways is taken; before a request computes for lack of room, it is
    looked at once more when it is next.
    """
    state = turn.state
    covered = run.covered_pages * state.tree.page_size
    for state_to in (end_of_state, run.first):
        choice = choose_way(state, request, worker, storage, run.names, covered, run.end, state_to, is_next=is_next)
        if choice.form != "state":
            break
        chunk_end = (run.first + 1) * run.names.pages_each * state.tree.page_size
        other = run_with(state, request, run.names[run.first], chunk_end)
        if other is not None:
            request.follows = other.fetch_id
            return choice
        if begin_run(turn, request, storage, run.names, run.first, state_to, choice):
            break
    has_no_room = state_to == run.first < end_of_state
    would_compute = choice.form == "recompute" or run.end == run.first
    if has_no_room and would_compute and not is_next:
        request.is_fetch_due = True
    elif choice.form != "kv":
        count(state, f"restorations_planned_{choice.form}")
    return choice


def _begin(turn: Turn, request: Request, storage: Storage, path: Path, run: _Run) -> bool:
    """Order a run, or as many chunks of it as there is room for; False where that is less than is worth it."""
    state = turn.state
    each, page_size = run.names.pages_each, state.tree.page_size
    first_page = run.first * each
    wanted = _pages_wanted(path, storage, first_page, run.end * each, run.covered_pages)
    others = sum(storage.ahead.values()) - storage.ahead.get(request.request_id, 0)
    room = int(host_pool(storage).total * state.config.prefetch_fraction) - storage.fetch_pages - others
    end, needed = run.end, sum(wanted)
    while end > run.first and needed > room:
        end -= 1
        needed -= sum(wanted[(end - run.first) * each :])
        del wanted[(end - run.first) * each :]
    if (end * each - run.covered_pages) * page_size < max(1, state.config.min_prefetch_tokens):
        count(state, "fetches_without_room")
        return False
    leased = _take_pages(turn, storage, path, needed)
    if leased is None:
        count(state, "fetches_without_room")
        return False
    taken = iter(unpack_int32(leased))
    pages = pack_int32([next(taken) if is_wanted else NOWHERE for is_wanted in wanted])
    _order(turn, request, storage, pages, run, end)
    return True


def _pages_wanted(path: Path, storage: Storage, start: int, end: int, covered: int) -> bytearray:
    """A 1 for each page of [start, end) that is to be brought: all but what is covered or has a copy further on."""
    wanted = bytearray(b"\x01") * (end - start)
    wanted[: covered - start] = bytes(max(0, covered - start))
    position = 0
    for node, pages in path:
        if storage.storage_id in node.host and storage.storage_id not in node.quarantined:
            low, high = max(position, start), min(position + pages, end)
            if low < high:
                wanted[low - start : high - start] = bytes(high - low)
        position += pages
    return wanted


def _take_pages(turn: Turn, storage: Storage, path: Path, pages: int) -> bytes | None:
    """Host pages for a fetch; the copies that it goes on from are not what makes room for it."""
    held = [node for node, _ in path if storage.storage_id in node.host]
    for node in held:
        lock_host(node, storage.storage_id)
    leased = take_host_pages(turn, storage, pages)
    for node in reversed(held):
        unlock_host(turn.state, node, storage)
    return leased


def _order(turn: Turn, request: Request, storage: Storage, pages: bytes, run: _Run, end: int) -> None:
    """Write a fetch down and send it."""
    state = turn.state
    each, page_size = run.names.pages_each, state.tree.page_size
    fetch_id = state.next_fetch
    state.next_fetch += 1
    deadline_ms = state.config.fetch_deadline_ms
    names = [run.names[index] for index in range(run.first, end)]
    fetch = Fetch(
        fetch_id=fetch_id,
        storage_id=storage.storage_id,
        namespace=request.submit.namespace,
        tokens=request.tokens[: end * each * page_size * TOKEN_BYTES],
        depth=run.first * each * page_size,
        pages=pages,
        timer_id=turn.set_timer(f"fetch.{fetch_id}", "fetch", str(fetch_id), deadline_ms),
        waiters={request.request_id: None},
        names=b"".join(names),
        queued_bytes=queued_bytes(state, storage),
        predicted_us=run.predicted_us if end == run.end else 0.0,
    )
    state.fetches[fetch_id] = fetch
    storage.fetching.update(dict.fromkeys(names, fetch_id))
    storage.fetch_pages += leased_pages(pages)
    request.fetch, request.fetch_end = fetch_id, end * each * page_size
    if not request.fetched_to:
        request.fetched_from = run.covered_pages * page_size
    count(state, "fetches_started")
    count(state, "restorations_planned_kv")
    order = FetchChunks(
        fetch_id=fetch_id,
        namespace=fetch.namespace,
        depth=fetch.depth,
        identities=run.names.identities(run.first * each, end * each),
        host_pages=pages,
        deadline_ms=deadline_ms,
        key_id=request.submit.key_id,
    )
    turn.to_storage(storage, order)


def leased_pages(pages: bytes) -> int:
    """Entries of a fetch's pages that are pages."""
    return len(pages) // PAGE_BYTES - unpack_int32(pages).count(NOWHERE)
