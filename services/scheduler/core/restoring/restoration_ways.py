"""The form to fetch for a waiting request, by the setting ``restoring`` and by cost.

``planned`` takes the fastest way (:mod:`restoration_choice`), and now and then another one (:mod:`exploration`).
Where a worker has no profile, KV is fetched wherever there is any, and hidden states only in its stead. A prefix that
may be lossy is weighed all the same, by observed speeds: it is read sparsely only where no exact way is as fast.
``kv``, ``hidden`` and ``important`` take that form wherever it exists.

Where no disk of the node is known to have the chunks, an object store is asked for them in one form or the other. The
store's contents are not known: a fetch is the question, and its result the answer. Chunks are asked for first in the
form in which the cell saves prefixes now, and in the other where that brought nothing. A request does not ask twice for
chunks that the store lacked.

Most prompts are new, and each such question costs the store's time, pages and a wait. So the second
form is given up for a while where it brought nothing to several requests in a row: then one in so many asks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from services.scheduler.core.hidden.hidden_form import is_worth_keeping, layout_for
from services.scheduler.core.hidden.hidden_in_flight import HIDDEN_FETCH_CHUNKS, Stretch, hidden_end, stretches_behind
from services.scheduler.core.rates import backlog_us, is_disk_speed_known
from services.scheduler.core.restoring.exploration import (
    find_trial,
    is_overruling,
    is_sparse_overruled,
    is_trial_due,
    left_us,
)
from services.scheduler.core.restoring.restoration_choice import (
    Choice,
    Prices,
    Ways,
    hidden_kind,
    observed_prices,
    prices_of,
    ways_back,
)
from services.scheduler.core.sparse.sparse_costs import sparse_prices
from services.scheduler.core.speed_fit import IMPORTANT_FROM_DISK, KV_FROM_DISK
from shared.chunks import chunk_tokens
from shared.messages.pools import HIDDEN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.scheduler.core.cache.identities import ChunkNames
    from services.scheduler.core.request import Request
    from services.scheduler.core.state import CellState, Storage, Worker
    from shared.messages.pools import ChunkForm, KvGeometry


def usable_hidden_end(
    state: CellState, request: Request, worker: Worker, storage: Storage, names: ChunkNames, first: int
) -> int:
    """Return the end of the hidden chunks from ``first`` on that this request may be restored from. Changes nothing."""
    if not storage.hidden.chunks or not may_restore(state, request, worker, storage):
        return first
    return hidden_end(storage, names, first)


def usable_stretches(
    state: CellState, request: Request, worker: Worker, storage: Storage, names: ChunkNames, first: int, end: int
) -> tuple[Stretch, ...]:
    """Return stretches of hidden chunks behind ``end``, within one fetch's reach from ``first``. Changes nothing.

    ``end`` is the result of :func:`usable_hidden_end` for ``first``. A disk that has no hidden states of a sequence's
    first chunk is not searched: most such prompts are new.
    """
    if end == 0 or not storage.hidden.chunks or not may_restore(state, request, worker, storage):
        return ()
    return stretches_behind(storage, names, end, first + HIDDEN_FETCH_CHUNKS)


def may_restore(state: CellState, request: Request, worker: Worker, storage: Storage) -> bool:
    """Return whether a request may be restored from hidden states of this storage, if there are any.

    Changes nothing.
    """
    may_use = state.config.restoring in ("planned", HIDDEN) and not request.hidden.refusals
    return may_use and layout_for(storage, worker) is not None


def choose_way(
    state: CellState,
    request: Request,
    worker: Worker,
    storage: Storage,
    names: ChunkNames,
    covered: int,
    kv_end: int,
    end_of_hidden: int,
    later: Sequence[Stretch] = (),
    *,
    end_of_sparse: int = 0,
    is_next: bool = False,
) -> Choice:
    """Return how to restore the chunks of a prompt that follow ``covered`` tokens. Changes nothing; O(chunks).

    There is KV of them up to the chunk ``kv_end`` (chunks that the disk is not known to have are asked of the object
    store), and hidden states up to the chunk ``end_of_hidden``, and in stretches of chunks ``later``. Where neither can
    be weighed, ``restoring_us`` of the choice is 0. Before hidden states that begin with a hole goes KV that may exist.
    Up to the chunk ``end_of_sparse`` it may be read sparsely; as much of that is weighed as of a fetch. ``is_next``: no
    waiting request stands before this one.
    """
    size = names.pages_each * state.tree.page_size
    first = covered // size
    is_planned = state.config.restoring == "planned"
    end_of_sparse = min(end_of_sparse, first + HIDDEN_FETCH_CHUNKS)
    later = later if end_of_hidden > first or kv_end == first else ()
    prices = prices_of(state, worker, storage, _ahead_us(state, request, worker, is_next=is_next))
    # A speed of the disk that was measured or set, not one that was observed: a disk that was slow once is tried again.
    if is_planned and prices is None and (end_of_sparse > first or is_disk_speed_known(storage)):
        prices = observed_prices(state, worker, storage, _ahead_us(state, request, worker, is_next=is_next))
    if is_planned and prices is not None:
        known = first
        while known < kv_end and names[known] in storage.disk.chunks:
            known += 1
        following, behind = known, tuple[Stretch, ...]()
        if known > first:
            following = usable_hidden_end(state, request, worker, storage, names, known)
            behind = usable_stretches(state, request, worker, storage, names, known, following)
        if max(known, end_of_hidden, end_of_sparse) > first or later:
            ways = Ways(
                request.token_count,
                covered,
                first * size,
                known * size,
                end_of_hidden * size,
                following * size,
                _in_tokens(later, size),
                _in_tokens(behind, size),
                sparse_end=end_of_sparse * size,
            )
            if request.submit.cache.importance is not None:
                importance = request.submit.cache.importance
                prices = replace(prices, sparse=sparse_prices(state, worker, storage, importance))
            choice = _fastest(state, request, storage, prices, ways)
            is_unknown = choice.form == "recompute" and known == first and kv_end > first
            return choice if not is_unknown else Choice("kv", 0.0, kind=KV_FROM_DISK)
    if end_of_sparse > first:
        return Choice("sparse", 0.0, kind=IMPORTANT_FROM_DISK)
    takes_hidden = (end_of_hidden > first or later) and (state.config.restoring == HIDDEN or kv_end == first)
    if not takes_hidden:
        return Choice("kv", 0.0, kind=KV_FROM_DISK)
    begin, end = (first, end_of_hidden) if end_of_hidden > first else later[0]
    choice = way_from_hidden(prices, layout_for(storage, worker), begin * size, max(covered, begin * size), end * size)
    return choice if not later else replace(choice, restoring_us=0.0, later=len(later))


def way_from_hidden(prices: Prices | None, layout: KvGeometry | None, begin: int, start: int, end: int) -> Choice:
    """Return how to restore tokens [start, end) from hidden states that begin at ``begin``, where nothing is weighed.

    Pure.
    """
    recomputed, restoring_us = (layout.absent if layout is not None else 0), 0.0
    if prices is not None:
        _, restoring_us, recomputed = prices.from_hidden(begin, start, end)
    return Choice("hidden", 0.0, restoring_us, recomputed, hidden_kind(layout, recomputed))


def way_of_question(state: CellState, worker: Worker, storage: Storage, begin: int, covered: int, end: int) -> Choice:
    """Return how to restore hidden states that only the object store may have: nothing is predicted.

    Changes nothing.
    """
    prices = prices_of(state, worker, storage)
    return replace(way_from_hidden(prices, layout_for(storage, worker), begin, covered, end), restoring_us=0.0)


def _fastest(state: CellState, request: Request, storage: Storage, prices: Prices, ways: Ways) -> Choice:
    """Return the fastest way, or a trial of another where one is due. Changes nothing."""
    weighed = tuple(ways_back(prices, ways))
    choice = replace(min(weighed, key=lambda each: each.total_us), weighed=weighed)
    if is_sparse_overruled(prices, ways, choice):
        choice = replace(choice, overrules_sparse=True)
    if not is_overruling(storage, prices, ways, choice):
        return choice
    trial = None
    if is_trial_due(storage):
        step, least = chunk_tokens(state.tree.page_size), state.config.min_prefetch_tokens
        left = left_us(state, request) - prices.ahead_us
        trial = find_trial(prices, ways, choice, step=step, least=least, left_us=left)
    return replace(trial, weighed=weighed) if trial is not None else replace(choice, is_overruling=True)


def _in_tokens(stretches: Sequence[Stretch], size: int) -> tuple[Stretch, ...]:
    return tuple((begin * size, end * size) for begin, end in stretches)


def _ahead_us(state: CellState, request: Request, worker: Worker, *, is_next: bool) -> float:
    """Return the microseconds before a worker comes to a request: its orders, and the queue before the request."""
    own = request.place.cost if request.worker_id == worker.worker_id else 0
    before = 0 if is_next else worker.line.cost - own
    return backlog_us(state, worker) - worker.line.cost + before


_PATIENCE = 8
"""Requests in a row to which a second form may bring nothing; beyond, only one in so many asks for it."""


def form_to_ask(state: CellState, request: Request, worker: Worker, storage: Storage, start: int) -> ChunkForm | None:
    """Return the form in which to ask the store for chunks from token ``start`` on; None where all were asked for.

    A question that is spared counts as one that brought nothing.
    """
    if not storage.disk.has_remote:
        return None
    for place, form in enumerate(_forms(state, request, worker, storage)):
        if request.prefetch.lacks.is_known(form, start):
            continue
        blanks = storage.fetching.blanks.of(form)
        if place == 0 or blanks < _PATIENCE or blanks % _PATIENCE == 0:
            return form
        state.count("store_questions_spared")
        storage.fetching.blanks.note_nothing(form)
        request.prefetch.lacks.note(form, start)
    return None


def _forms(state: CellState, request: Request, worker: Worker, storage: Storage) -> tuple[ChunkForm, ...]:
    """Return the forms that may be asked for, the preferred one first."""
    if not may_restore(state, request, worker, storage):
        return ("kv",)
    if state.config.restoring == HIDDEN:
        return (HIDDEN,)
    return (HIDDEN, "kv") if is_worth_keeping(state, storage) else ("kv", HIDDEN)
