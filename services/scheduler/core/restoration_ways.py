"""What may be fetched for a waiting request, and which of it is: by the setting ``restoring`` and by what it costs.

``planned`` takes what is fastest (:mod:`restoration_choice`). Where a worker has no profile nothing can be weighed: KV
is fetched wherever there is any, and state only in its stead. ``kv`` and ``state`` take that form wherever it exists.
"""

from __future__ import annotations

from services.scheduler.core.chunk_run import ChunkNames
from services.scheduler.core.rates import backlog_us
from services.scheduler.core.restoration_choice import (
    KV_FROM_DISK,
    Choice,
    Ways,
    choose,
    layout_for,
    prices_of,
    state_kind,
)
from services.scheduler.core.state import CellState, Request, Storage, Worker
from services.scheduler.core.state_runs import state_end


def usable_state_end(
    state: CellState, request: Request, worker: Worker, storage: Storage, names: ChunkNames, first: int
) -> int:
    """Behind the last chunk of state from ``first`` on that this request may be restored from. Does not mutate."""
    may_use = state.config.restoring in ("planned", "state") and not request.state_refusals
    if not may_use or not storage.state_chunks or layout_for(storage, worker) is None:
        return first
    return state_end(storage, names, first)


def choose_way(
    state: CellState,
    request: Request,
    worker: Worker,
    storage: Storage,
    names: ChunkNames,
    covered: int,
    kv_end: int,
    end_of_state: int,
    *,
    is_next: bool = False,
) -> Choice:
    """How the chunks of a prompt that follow ``covered`` tokens come back. Does not mutate; O(chunks).

    There is KV of them up to the chunk ``kv_end`` (what the disk is not known to have the object store is asked for),
    and state up to the chunk ``end_of_state``. Where neither can be weighed, ``restoring_us`` of the choice is 0.
    ``is_next``: nothing that waits stands before the request.
    """
    size = names.pages_each * state.tree.page_size
    first = covered // size
    is_planned = state.config.restoring == "planned"
    prices = prices_of(state, worker, storage, _ahead_us(state, request, worker, is_next=is_next))
    if is_planned and prices is not None:
        known = first
        while known < kv_end and names[known] in storage.chunks:
            known += 1
        following = usable_state_end(state, request, worker, storage, names, known) if known > first else known
        if max(known, end_of_state) > first:
            ways = Ways(request.token_count, covered, first * size, known * size, end_of_state * size, following * size)
            choice = choose(prices, ways)
            is_unknown = choice.form == "recompute" and known == first and kv_end > first
            return choice if not is_unknown else Choice("kv", 0.0, kind=KV_FROM_DISK)
    takes_state = end_of_state > first and (state.config.restoring == "state" or kv_end == first)
    if not takes_state:
        return Choice("kv", 0.0, kind=KV_FROM_DISK)
    layout = layout_for(storage, worker)
    recomputed, restoring_us = (layout.absent if layout is not None else 0), 0.0
    if prices is not None:
        _, restoring_us, recomputed = prices.state(first * size, covered, end_of_state * size)
    return Choice("state", 0.0, restoring_us, recomputed, state_kind(layout, recomputed))


def _ahead_us(state: CellState, request: Request, worker: Worker, *, is_next: bool) -> float:
    """What a worker does before it comes to a request: what it was told to, and what waits there besides."""
    own = request.cost if request.worker_id == worker.worker_id else 0
    before = 0 if is_next else worker.queued_cost - own
    return backlog_us(state, worker) - worker.queued_cost + before
