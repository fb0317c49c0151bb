"""Prefetches for waiting requests from below host memory, ahead of their turn (Strata 4.2).

A request's prompt may continue in chunks of its node's storage where the tree has no node for it any more. The run of
whole chunks behind what its worker can reuse is ordered into leased host pages when the request is queued, or is
among the first of a long queue, so that the disk works while the request waits; :mod:`fetches` takes over the chunks
that arrive, and the request is matched against them as against any other host copy. Where a chunk is in flight for
another request, the request shares that fetch. Requests that find no room (:mod:`fetch_orders`) are served in order of
arrival as it comes free.

Where the disk has hidden states of the next chunks, beside their KV or in its place, :mod:`restoration_choice` decides
which of them to fetch, or that computing is faster than either; ``restoring`` may settle that.

A request that allows a lossy prefix may have the next chunks read sparsely by its worker instead
(:mod:`sparse_prefixes`): then nothing is fetched for it.

Where neither has it and another node does, it is read from there (:mod:`lending`): from its host memory, or after that
node has fetched it from its own disk, which the request waits for like for a fetch of its own node.

The contents of the object store are not known. It is asked for a few chunks at first and for as many as one fetch may
bring once those came, so that a new prompt displaces few host copies for nothing; :mod:`restoration_ways` decides the
form.
"""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING

from services.scheduler.core.cache.identities import ChunkNames, usable_pages
from services.scheduler.core.cache.prefix_match import find_path, matched_path, reach
from services.scheduler.core.cache.victims import hold_end
from services.scheduler.core.hidden.hidden_runs import begin_run, run_with
from services.scheduler.core.restoring.exploration import note_decision, note_declined_loan, note_trial
from services.scheduler.core.restoring.restoration_ways import (
    choose_way,
    form_to_ask,
    usable_hidden_end,
    usable_stretches,
    way_of_question,
)
from services.scheduler.core.sparse.sparse_prefixes import choose_sparse, usable_sparse_end
from services.scheduler.core.tiers.catalogue import has_lower_tiers
from services.scheduler.core.tiers.fetch_orders import KvRun, begin_fetch
from services.scheduler.core.tiers.lending import (
    beats_computing,
    find_loan,
    find_on_disks,
    is_worth_borrowing,
    may_be_lent,
    may_borrow,
    raising_us,
)
from services.scheduler.core.tiers.writes import copy_to_lend
from services.scheduler.core.waiting.transient import tokens_coming
from shared.chunks import chunk_tokens
from shared.messages.pools import HIDDEN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.scheduler.core.cache.prefix_tree import Path
    from services.scheduler.core.hidden.hidden_in_flight import Further, Stretch
    from services.scheduler.core.request import Request
    from services.scheduler.core.restoring.restoration_choice import Choice
    from services.scheduler.core.state import CellState, Storage, Worker
    from services.scheduler.core.step import Step
    from services.scheduler.core.tiers.lending import Loan
    from shared.messages.pools import ChunkForm

_NODES, _LOADING = itemgetter(0), attrgetter("loading")

FETCH_CHUNKS = 256
"""Chunks of one fetch at most. Bounds the size of its order and the pages that one request takes at once."""

PROBED_CHUNKS = 16
"""Chunks that an object store is asked for before it has proved to hold any of the sequence."""

NEAR = 16
"""Requests of a worker's queue that may have fetches: earlier ones would be evicted again before their turn."""

_STARTS_AT_ONCE = 8
"""Requests at most for which a step that frees room begins fetches: bounds its time."""


def prefetch_when_near(step: Step, request: Request) -> None:
    """Prefetch for a queued request now or, where many stand before it, when it is among the first."""
    state = step.state
    worker = state.workers[request.worker_id]
    if worker.line.queue.size <= NEAR:
        prefetch(step, request)
    else:
        storage = state.storage_of(worker)
        request.prefetch.is_due = storage is not None and storage.pool is not None


def prefetch_for_first(step: Step, worker: Worker, names: Sequence[str]) -> None:
    """Begin fetches that were put off for these requests, the first in a worker's queue."""
    state = step.state
    storage = state.storage_of(worker)
    if storage is None or storage.pool is None:
        return
    for name in names:
        request = state.requests[name]
        is_due = request.prefetch.is_due and name not in storage.fetching.due
        if is_due or (request.prefetch.looks_again and _is_more_known(state, request)):
            prefetch(step, request)


def _is_more_known(state: CellState, request: Request) -> bool:
    """Return whether the tree has more of a prompt than when it was last looked at."""
    known = sum(pages for _, pages in find_path(state, request)) * state.tree.page_size
    return known > request.prefetch.counted


def prefetch(step: Step, request: Request, *, is_next: bool = False) -> None:
    """Begin or join a fetch for a request that waits at a worker, if there is something to fetch.

    Its copies in host memory are held for it, also where nothing is below: an evicted part would have to be computed.
    ``is_next`` says that it would run now: it waits neither for another's computation nor behind other fetches.
    """
    state = step.state
    request.prefetch.is_due = request.prefetch.looks_again = False
    worker = state.workers[request.worker_id]
    storage = state.storage_of(worker)
    is_possible = request.may_reuse and state.config.restoring != "recompute"
    is_below = storage is not None and (has_lower_tiers(storage) or may_borrow(state, storage))
    if storage is None or not is_below or storage.fetching.late or not is_possible:
        for other in state.storages.values():
            other.fetching.due.pop(request.request_id, None)
        if storage is not None and storage.pool is not None and is_possible and not is_below:
            hold_end(state, storage, request.request_id, matched_path(state, request))
            request.prefetch.counted = 0  # It was looked at, and nothing can be fetched again.
        return  # A storage that let a deadline pass gets no order until it answers.
    has_room = _try(step, request, worker, storage, is_next=is_next)
    request.prefetch.looks_again &= not request.prefetch.fetch
    if has_room:
        storage.fetching.due.pop(request.request_id, None)
    else:
        request.prefetch.is_due = True
        storage.fetching.due[request.request_id] = None  # It keeps its place in the queue, if it had one.


def begin_due(step: Step) -> None:
    """Begin fetches that waited for room, where some was freed."""
    state = step.state
    for storage_id in list(state.roomy):
        storage = state.storages.get(storage_id)
        for name in list(storage.fetching.due)[:_STARTS_AT_ONCE] if storage is not None else ():
            prefetch(step, state.requests[name])
            if state.requests[name].prefetch.is_due:
                break
    state.roomy.clear()


def _try(step: Step, request: Request, worker: Worker, storage: Storage, *, is_next: bool) -> bool:
    """Begin or join a fetch if there is something to fetch now; return False if there is no room for it."""
    state = step.state
    tokens, tree = request.tokens, state.tree
    most_pages = usable_pages(tree, tokens)
    path = matched_path(state, request)
    covered = _covered_pages(state, path, worker)
    names = ChunkNames(tree, request.submit.namespace, tokens, path, most_pages)
    first = covered // names.pages_each
    page_size = tree.page_size
    hold_end(state, storage, request.request_id, path)
    has_gone = covered * page_size < request.prefetch.foreseen
    # Evicted chunks are fetched once more; from another node again and again, as long as the request waits.
    if has_gone and is_next and (bool(storage.shares) or not request.prefetch.is_again):
        request.prefetch.forget_brought()
        request.prefetch.is_again = True
    request.prefetch.counted = max(request.prefetch.counted, covered * page_size)
    if first >= names.count or covered * page_size < request.prefetch.brought_to:
        return True
    if request.hidden.run is not None or request.sparse.choice is not None:  # Chunks behind those are computed.
        return True
    if not is_next and _is_being_computed(state, request, worker, covered * page_size):
        request.prefetch.is_due = True  # The KV before the next chunks is not computed yet.
        return True
    end_of_hidden, later = _hidden_ahead(state, request, worker, storage, names, first, covered)
    shared_fetch = storage.fetching.chunks.get(names[first])
    if shared_fetch is not None and not (end_of_hidden > first and state.config.restoring == HIDDEN):
        _join(state, request, storage, shared_fetch, names, first)
        request.prefetch.brought_from = (
            request.prefetch.brought_from if request.prefetch.brought_to else covered * page_size
        )
        return True
    loan = _loan(state, request, worker, storage, path, names, covered)
    if loan is not None:
        run = KvRun(names, first, loan.end, covered)
        return begin_fetch(step, request, storage, path, run, is_next=is_next, loan=loan)
    # Another node may have computed what comes next before the request's turn.
    request.prefetch.looks_again = not is_next and may_borrow(state, storage) and may_be_lent(request, storage)
    if copy_to_lend(step, request, storage, path, covered):
        return True
    if end_of_hidden == first and not later and _raise(step, request, worker, storage, path, names, covered):
        return True
    end, asked = _end_of_run(state, request, worker, storage, names, first)
    end_of_sparse = usable_sparse_end(state, request, worker, storage, names, first, covered * page_size)
    run = KvRun(names, first, end, covered)
    if asked == HIDDEN and max(end, end_of_hidden, end_of_sparse) == first and not later:
        is_settled = _ask_for_hidden(step, request, worker, storage, run, is_next=is_next)
        return is_settled or _try(step, request, worker, storage, is_next=is_next)
    choice = _chosen(step, request, worker, storage, run, end_of_hidden, later, end_of_sparse, is_next=is_next)
    run = replace(run, end=_end_of_choice(state, choice, end), predicted_us=choice.restoring_us)
    if choice.form != "kv" or (run.end * names.pages_each - covered) * page_size < state.config.min_prefetch_tokens:
        return True
    is_behind = bool(storage.fetching.due) and next(iter(storage.fetching.due)) != request.request_id
    if is_behind and not is_next and not request.prefetch.brought_to:
        return False
    has_room = begin_fetch(step, request, storage, path, run, is_next=is_next)
    if has_room:
        note_trial(state, storage, choice)
    return has_room


def _covered_pages(state: CellState, path: Path, worker: Worker) -> int:
    """Return the number of leading pages that the worker has, is about to have, or can load."""
    loading: dict[int, str | None] = {}
    if any(map(_LOADING, map(_NODES, path))):
        loading = {node.id: None for node, _ in path if worker.worker_id in node.loading}
    return reach(state, path, worker, loading).pages


def _is_being_computed(state: CellState, request: Request, worker: Worker, covered_tokens: int) -> bool:
    """Return whether the request will be deferred for another that computes the next tokens (:mod:`deferral`)."""
    coming = tokens_coming(state, request).get(worker.worker_id, 0)
    return 0 < state.config.defer_tokens < coming - covered_tokens


def _loan(
    state: CellState,
    request: Request,
    worker: Worker,
    storage: Storage,
    path: Path,
    names: ChunkNames,
    covered_pages: int,
) -> Loan | None:
    """Return what to read from another node's host memory next; None unless that is the fastest."""
    if state.config.restoring == HIDDEN:
        return None
    loan = find_loan(state, request, storage, path, names, covered_pages, FETCH_CHUNKS)
    if loan is None:
        return None
    size, covered = names.pages_each * state.tree.page_size, covered_pages * state.tree.page_size
    first = on_disk = covered_pages // names.pages_each
    while on_disk < loan.end and names[on_disk] in storage.disk.chunks:
        on_disk += 1
    tokens = loan.end * size - covered
    if tokens < state.config.min_prefetch_tokens:
        return None
    on_disk_tokens = on_disk * size - covered if on_disk > first else 0
    if is_worth_borrowing(state, worker, storage, covered, tokens, on_disk_tokens):
        return loan
    note_declined_loan(storage)
    request.prefetch.is_loan_over = True  # No loan is looked for again when it is next.
    return None


def _raise(
    step: Step,
    request: Request,
    worker: Worker,
    storage: Storage,
    path: Path,
    names: ChunkNames,
    covered_pages: int,
) -> bool:
    """Have another node fetch the next chunks from its disk, to be lent afterwards, if that beats computing.

    Returns whether the request waits for that now. Each part is asked for once.
    """
    state = step.state
    size, covered = chunk_tokens(state.tree.page_size), covered_pages * state.tree.page_size
    first = covered_pages // names.pages_each
    if state.config.restoring == HIDDEN or first * size < request.prefetch.raised_to:
        return False
    found = find_on_disks(state, request, storage, names, first, FETCH_CHUNKS)
    if found is None:
        return False
    lender, end = found
    tokens = end * size - covered
    needed_us = raising_us(state, lender, storage, tokens)
    is_too_short = tokens < state.config.min_prefetch_tokens
    if is_too_short or not beats_computing(state, worker, covered, tokens, needed_us):
        return False
    under_way = lender.fetching.chunks.get(names[first])
    if under_way is not None:
        _join(state, request, lender, under_way, names, first)
    else:
        coming = (index for index in range(first, end) if names[index] in lender.fetching.chunks)
        run = KvRun(names, first, next(coming, end), first * names.pages_each)
        hold_end(state, lender, request.request_id, path)  # It evicts no copies of requests that wait there.
        begin_fetch(step, request, lender, path, run)
        if not request.prefetch.fetch:  # There is no room.
            return False
        state.count("raises_started")
    request.prefetch.raised_to = request.prefetch.end
    return True


def _end_of_run(
    state: CellState, request: Request, worker: Worker, storage: Storage, names: ChunkNames, first: int
) -> tuple[int, ChunkForm | None]:
    """Return the end of the chunks of KV worth ordering, and the form in which to ask the store from there.

    These are chunks of the catalogue and then, where KV is the form to ask for, chunks that the object store may have.
    """
    size = names.pages_each * state.tree.page_size
    if request.prefetch.lacks.is_known("kv", first * size):  # A fetch of KV ended there.
        return first, form_to_ask(state, request, worker, storage, first * size)
    most = min(names.count, first + FETCH_CHUNKS)
    end = first
    while end < most and names[end] in storage.disk.chunks and names[end] not in storage.fetching.chunks:
        end += 1
    asked = form_to_ask(state, request, worker, storage, end * size) if end < most else None
    if asked == "kv":
        most = most if request.prefetch.brought_to > 0 else min(most, end + PROBED_CHUNKS)
        while end < most and names[end] not in storage.fetching.chunks:
            end += 1
    return end, asked


def _ask_for_hidden(
    step: Step, request: Request, worker: Worker, storage: Storage, run: KvRun, *, is_next: bool
) -> bool:
    """Ask the object store for the first of a request's hidden states; return False if another form is to be tried.

    Where they are in flight for another request, this one waits for them. Where there is no room the request is looked
    at once more when it is next, and then goes on without.
    """
    state, names = step.state, run.names
    size = names.pages_each * state.tree.page_size
    covered, end = run.covered_pages * state.tree.page_size, min(names.count, run.first + PROBED_CHUNKS)
    if end * size - covered < state.config.min_prefetch_tokens or _follows(state, request, run):
        return True
    choice = way_of_question(state, worker, storage, run.first * size, covered, end * size)
    if begin_run(step, request, storage, names, run.first, end, choice, further="asked"):
        state.count("store_questions_hidden")
        return True
    if is_next:
        request.prefetch.lacks.note(HIDDEN, run.first * size)
        return False
    request.prefetch.is_due = True
    return True


def _follows(state: CellState, request: Request, run: KvRun) -> bool:
    """Wait for another request's fetch of the hidden states of the next chunk, if there is one; return whether."""
    chunk_end = (run.first + 1) * run.names.pages_each * state.tree.page_size
    other = run_with(state, request, run.names[run.first], chunk_end)
    if other is not None:
        request.prefetch.follows = other.fetch_id
        other.followers[request.request_id] = None
    return other is not None


def _end_of_choice(state: CellState, choice: Choice, end: int) -> int:
    """Return the end of the chunks to bring: ``end``, unless it is a trial of fewer."""
    return choice.end // chunk_tokens(state.tree.page_size) if choice.is_trial else end


def _join(state: CellState, request: Request, storage: Storage, fetch_id: int, names: ChunkNames, first: int) -> None:
    """Share the fetch that brings a request's next chunk, as far as its chunks are the same."""
    end = first + 1
    while end < names.count and storage.fetching.chunks.get(names[end]) == fetch_id:
        end += 1
    state.fetches[fetch_id].waiters[request.request_id] = None
    request.prefetch.fetch, request.prefetch.end = fetch_id, end * names.pages_each * state.tree.page_size
    state.count("fetches_shared")


def _hidden_ahead(
    state: CellState,
    request: Request,
    worker: Worker,
    storage: Storage,
    names: ChunkNames,
    first: int,
    covered: int,
) -> tuple[int, tuple[Stretch, ...]]:
    """Return the end of the next hidden chunks, and stretches of more behind; ``first`` and none where too few."""
    end = usable_hidden_end(state, request, worker, storage, names, first)
    later = usable_stretches(state, request, worker, storage, names, first, end)
    chunks = sum(stop - start for start, stop in later)
    pages = chunks * names.pages_each + max(0, end * names.pages_each - covered)
    return (end, later) if pages * state.tree.page_size >= state.config.min_prefetch_tokens else (first, ())


def _chosen(
    step: Step,
    request: Request,
    worker: Worker,
    storage: Storage,
    run: KvRun,
    end_of_hidden: int,
    later: tuple[Stretch, ...],
    end_of_sparse: int,
    *,
    is_next: bool,
) -> Choice:
    """Return how to restore a request's next chunks. Hidden states are ordered here; ``kv`` is left to the caller.

    Where hidden states have no room, the best of the other ways is taken; before a request computes for lack of room,
    it is looked at once more when it is next.
    """
    state = step.state
    covered = run.covered_pages * state.tree.page_size
    for hidden_to, behind in ((end_of_hidden, later), (run.first, ())):
        choice = choose_way(
            state,
            request,
            worker,
            storage,
            run.names,
            covered,
            run.end,
            hidden_to,
            behind,
            end_of_sparse=end_of_sparse,
            is_next=is_next,
        )
        if choice.form != "hidden":
            break
        if _follows(state, request, run):
            return choice
        end = _end_of_choice(state, choice, hidden_to)
        further: Further = "goal" if choice.is_trial else "disk"
        stretches = behind[: choice.later]
        if begin_run(step, request, storage, run.names, run.first, end, choice, further=further, later=stretches):
            note_trial(state, storage, choice)
            break
    has_no_room = hidden_to == run.first and not behind and (end_of_hidden > run.first or bool(later))
    would_compute = choice.form == "recompute" or (choice.form != "sparse" and run.end == run.first)
    if choice.form == "sparse":
        choose_sparse(state, request, storage, run.names, run.first, end_of_sparse)
    if has_no_room and would_compute and not is_next:
        request.prefetch.is_due = True
    elif choice.form != "kv":
        state.count(f"restorations_planned_{choice.form}")
    note_decision(storage, choice)
    if state.recollection is not None:
        state.recollection.note_weighed(request.request_id, [each.told(choice.form) for each in choice.weighed])
    return choice
