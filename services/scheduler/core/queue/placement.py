"""The worker for a waiting request: the one where its prefill is estimated to be done first.

Everything is weighed in estimated time (see :mod:`rates`): the worker's computing and loading for the request, after
the work that it has already. Tokens that another request there is about to compute cost nothing more, because that
request's own cost is counted in the work before (Strata 4.3.1). Where nodes have disks of their own, tokens that a
node's disk holds, or that another node lends from its memory or disk, cost the time of fetching them, if that is less
than computing them.

Work stealing: a worker with nothing to do takes waiting requests from one that has no time for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from services.scheduler.core.cache.identities import ChunkNames, usable_pages
from services.scheduler.core.cache.prefix_match import matched_path, reach
from services.scheduler.core.cache.residency import copies_of, devices_of
from services.scheduler.core.rates import backlogs_us, disk_us, load_us, recompute_us
from services.scheduler.core.restoring.restoration_ways import choose_way, usable_hidden_end, usable_stretches
from services.scheduler.core.sparse.sparse_prefixes import usable_sparse_end
from services.scheduler.core.tiers.lending import borrowing, raising
from services.scheduler.core.waiting.transient import tokens_coming

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from services.scheduler.core.cache.prefix_tree import Path
    from services.scheduler.core.request import Request
    from services.scheduler.core.state import CellState, Worker


_ALL_COMPARED = 8
"""Size up to which all workers of a cell are compared; in a larger cell, this many of those that hold something."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A worker for a request: estimated microseconds of its prefill there, and tokens that it would compute."""

    worker: Worker
    cost_us: int
    uncached: int


def fits(state: CellState, request: Request, worker: Worker) -> bool:
    """Return whether the request, alone on this worker, can run to its last token."""
    tokens = request.max_tokens_total
    has_room = tokens <= worker.max_context and -(-tokens // state.tree.page_size) <= worker.pool.total
    return has_room and has_adapter(worker, request.submit.adapter)


def has_adapter(worker: Worker, adapter: str) -> bool:
    """Return whether a worker serves requests with this adapter; "" is the base model."""
    if not adapter:
        return True
    held = worker.adapters.get(adapter)
    return held is not None and held.is_loaded


def takes_requests(state: CellState, adapter: str = "") -> bool:
    """Return whether a worker is given new requests with this adapter. Changes nothing."""
    return any(
        worker.drain is None and (not adapter or has_adapter(worker, adapter)) for worker in state.workers.values()
    )


def place(state: CellState, request: Request) -> Placement | None:
    """Return the best worker for a request, or None when it fits nowhere. Ties go to the one that joined first."""
    if not takes_requests(state, request.submit.adapter):
        return None
    path = matched_path(state, request)
    coming = tokens_coming(state, request) if state.transient.marks else {}
    names = _names_on_disks(state, request, path)
    best: tuple[float, Placement] | None = None
    for worker, backlog in _compared(state, request, path, coming, names):
        placement = estimate(state, request, worker, path, coming.get(worker.worker_id, 0), names)
        total = placement.cost_us + backlog
        if best is None or total < best[0]:
            best = (total, placement)
    return None if best is None else best[1]


def estimate(
    state: CellState, request: Request, worker: Worker, path: Path, coming: int, names: ChunkNames | None = None
) -> Placement:
    """Return the estimated cost of a request on a worker.

    ``coming``: leading tokens that other requests there will have computed. ``names`` are those of the prompt's chunks,
    where the contents of disks are to be weighed.
    """
    found = reach(state, path, worker)
    page_size = state.tree.page_size
    cached, loaded = found.pages * page_size, found.loaded_pages * page_size
    threshold = state.config.defer_tokens
    if 0 < threshold < coming - cached:
        cached, loaded = coming, 0  # It would be deferred until they are computed.
    uncached = request.token_count - cached
    cost = recompute_us(state, worker, cached, uncached)
    if names is not None:
        cost = min(cost, _cost_with_disk(state, request, worker, cached, names))
    lent, lent_us = borrowing(state, request, worker, path, cached) if state.storages and path else (0, 0.0)
    raised, raised_us = raising(state, request, worker, names, cached + lent) if names is not None else (0, 0.0)
    if lent or raised:
        rest = recompute_us(state, worker, cached + lent + raised, uncached - lent - raised)
        cost = min(cost, lent_us + raised_us + rest)
    if loaded:
        cost += load_us(state, worker, loaded)
    return Placement(worker, round(cost), uncached)


def _names_on_disks(state: CellState, request: Request, path: Path) -> ChunkNames | None:
    """Return the names of the prompt's chunks, or None where it cannot matter which node's disk has them."""
    storages = state.storages.values()
    is_on_disks = any(storage.disk.chunks or storage.hidden.chunks for storage in storages)
    if len(storages) < 2 or not is_on_disks or not request.may_reuse or state.config.restoring == "recompute":
        return None
    tokens = request.tokens
    return ChunkNames(state.tree, request.submit.namespace, tokens, path, usable_pages(state.tree, tokens))


def _cost_with_disk(state: CellState, request: Request, worker: Worker, cached: int, names: ChunkNames) -> float:
    """Return the cost of the rest of a prompt if chunks on the node's disk are fetched; infinite without any.

    Where the worker has a profile, in the form and by the means that are fastest (:mod:`restoration_ways`).
    """
    storage = state.storage_of(worker)
    page_size = state.tree.page_size
    end = first = cached // page_size // names.pages_each
    if storage is None:
        return inf
    while end < names.count and names[end] in storage.disk.chunks:
        end += 1
    end_of_hidden = usable_hidden_end(state, request, worker, storage, names, first)
    later = usable_stretches(state, request, worker, storage, names, first, end_of_hidden)
    end_of_sparse = usable_sparse_end(state, request, worker, storage, names, first, cached)
    if max(end, end_of_hidden, end_of_sparse) > first or later:
        choice = choose_way(
            state, request, worker, storage, names, cached, end, end_of_hidden, later, end_of_sparse=end_of_sparse
        )
        if choice.total_us:
            return choice.total_us
    if end == first:
        return inf
    reached = end * names.pages_each * page_size
    computing = recompute_us(state, worker, reached, request.token_count - reached)
    return computing + disk_us(state, worker, storage, reached - cached)


def _compared(
    state: CellState, request: Request, path: Path, coming: Iterable[str], disks: ChunkNames | None
) -> list[tuple[Worker, float]]:
    """Return the workers worth comparing, in order of joining, each with its backlog in microseconds.

    Those that hold or will have a part of the prompt, and the idlest.
    """
    tokens, adapter = request.max_tokens_total, request.submit.adapter
    pages = -(-tokens // state.tree.page_size)
    workers = state.workers
    fitting = [
        worker
        for worker in workers.values()
        if tokens <= worker.max_context
        and pages <= worker.pool.total
        and worker.drain is None
        and (not adapter or has_adapter(worker, adapter))
    ]
    backlogs = backlogs_us(state, fitting)
    if len(backlogs) <= _ALL_COMPARED:
        return [(workers[name], backlog) for name, backlog in backlogs.items()]
    chosen = {min(backlogs, key=backlogs.__getitem__): None}
    for names in _holders(state, path, coming, disks):
        known = [name for name in names if name in backlogs and name not in chosen]
        # Among workers that hold the same, the least loaded are better in every respect.
        known.sort(key=backlogs.__getitem__)
        chosen |= dict.fromkeys(known[: _ALL_COMPARED // 2])
        if len(chosen) > _ALL_COMPARED:
            break
    return [(workers[name], backlog) for name, backlog in backlogs.items() if name in chosen]


def _holders(state: CellState, path: Path, coming: Iterable[str], disks: ChunkNames | None) -> Iterator[list[str]]:
    """Yield groups of worker ids, the most promising first.

    Those that compute a part of the prompt, those whose disk has the next chunk, those that hold the longest part.
    """
    yield list(coming)
    following = 0 if disks is None else sum(pages for _, pages in path) // disks.pages_each
    if disks is not None and following < disks.count:
        name = disks[following]
        near = [item.node for item in state.storages.values() if name in item.disk.chunks or name in item.hidden.chunks]
        yield _workers_near(state, dict.fromkeys(near))
    for node, _ in reversed(path):
        holders = devices_of(state, node)
        yield list(holders)
        near = [state.storages[storage_id].node for storage_id in copies_of(state, node)]
        if state.config.neighbour_loads:
            near += [state.workers[name].node for name in holders]
        yield _workers_near(state, dict.fromkeys(near))


def _workers_near(state: CellState, nodes: Mapping[str, None]) -> list[str]:
    return [name for name, worker in state.workers.items() if worker.node in nodes] if nodes else []
