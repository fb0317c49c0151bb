"""Admission to a worker: match, lock, make room, allocate, and the AdmitRequest that says so."""

from __future__ import annotations

from services.scheduler.core.deferral import announce
from services.scheduler.core.draft import Candidate, Draft
from services.scheduler.core.hotness.tracking import request_admitted
from services.scheduler.core.identities import page_identities
from services.scheduler.core.lifecycle import RequestEvent, next_state
from services.scheduler.core.page_pool import allocate
from services.scheduler.core.queueing import admitted_from_queue
from services.scheduler.core.reach import Reach, cut_to_fit, matched_path, reach
from services.scheduler.core.residency import (
    begin_loading,
    lock_host,
    lock_path,
    touch,
    unlock_host,
    unlock_path,
    visit,
)
from services.scheduler.core.state import (
    CellState,
    Load,
    Request,
    Storage,
    Worker,
    count,
    storage_of,
    worker_storage_id,
)
from services.scheduler.core.tiers import can_make_room, make_room
from services.scheduler.core.turn import Turn
from shared.messages.worker_plans import AdmitRequest, PageLoad


def try_admit(turn: Turn, candidate: Candidate, worker: Worker, draft: Draft) -> bool:
    """Admit a WAITING request, if its pages can be had now; a load for it, if any, joins the draft."""
    state, request = turn.state, candidate.request
    path, found = candidate.path, candidate.found
    if candidate.stage != draft.stage:  # Another admission may have evicted, cut or begun to load what it matched.
        path = matched_path(state, request)
        found = reach(state, path, worker, draft.loading)
    total_pages = pages_for(state, request, request.token_count + lease_room(state, request))
    fresh = total_pages - found.device_pages - found.joined_pages
    locked_anew = sum(pages for node, pages in path[: len(found.device)] if worker.worker_id not in node.locks)
    if not can_make_room(worker, fresh + locked_anew):
        return False
    upper = cut_to_fit(state, path, found)
    if upper is not None and found.joined and not found.host:
        draft.loading[upper.id] = None
    storage = storage_of(state, worker)
    _hold(state, found, worker, storage)
    pages = allocate(worker.pool, fresh) if make_room(turn, worker, fresh) else None
    if pages is None:
        _let_go(state, found, worker, storage)
        return False
    _take_over(turn, request, worker, found, pages)
    if storage is not None and found.host:
        _begin_load(turn, request, worker, storage, found, pages, draft)
    _send(turn, request, worker, found)
    draft.stage += 1
    draft.places -= 1
    return True


def pages_for(state: CellState, request: Request, tokens: int) -> int:
    """Pages for so many tokens, never more than the longest possible answer needs."""
    return -(-min(tokens, request.max_tokens_total) // state.tree.page_size)


def lease_room(state: CellState, request: Request) -> int:
    """Decode tokens that a request gets pages for at once."""
    return min(state.config.lease_tokens, request.max_tokens_total - request.token_count)


def _hold(state: CellState, found: Reach, worker: Worker, storage: Storage | None) -> None:
    """Keep what was matched from being evicted to make room for the rest."""
    held = found.deepest_held
    if held is not None:
        lock_path(state, held, worker)
    if storage is not None:
        for node in found.host:
            lock_host(node, storage.storage_id)


def _let_go(state: CellState, found: Reach, worker: Worker, storage: Storage | None) -> None:
    held = found.deepest_held
    if held is not None:
        unlock_path(state, held, worker)
    if storage is not None:
        for node in reversed(found.host):
            unlock_host(state, node, storage)


def _take_over(turn: Turn, request: Request, worker: Worker, found: Reach, fresh: bytes) -> None:
    """Write down where the request runs and what it owns."""
    state = turn.state
    cached = found.pages * state.tree.page_size
    admitted_from_queue(turn, request, worker, request.token_count - cached)
    request.state = next_state(request.state, RequestEvent.ADMIT)
    request.worker_id = worker.worker_id
    name = worker.worker_id
    shared = [node.device[name] for node in found.device] + [node.loading[name] for node in found.joined]
    request.pages = b"".join(shared) + fresh
    request.shared = found.pages
    held = found.deepest_held
    request.node = held.id if held is not None else 0
    request.planned = request.computed = cached
    request.is_poisoned = False
    request.lease_generated = -1
    worker.running.append(request.request_id)
    worker.unplanned += request.token_count - cached
    announce(state, request, request.token_count - cached)
    reused = found.nodes
    for node in reused:
        node.hits += 1
        touch(state, node, turn.seq)
    state.admissions += 1
    request_admitted(turn, reused)
    visit(state, worker.worker_id, worker_storage_id(state, worker), reused, request.token_count)


def _begin_load(
    turn: Turn, request: Request, worker: Worker, storage: Storage, found: Reach, fresh: bytes, draft: Draft
) -> None:
    """Give the matched host nodes the first of the fresh pages, and say what is to be copied where."""
    state = turn.state
    offset = 0
    for node in found.host:
        size = len(node.host[storage.storage_id])
        begin_loading(state, node, worker, fresh[offset : offset + size])
        draft.loading[node.id] = None
        offset += size
    deepest = found.host[-1]
    held = found.deepest_held
    if held is not None:
        unlock_path(state, held, worker)
    lock_path(state, deepest, worker)
    request.node = deepest.id
    count(state, "loads_started")
    loaded = found.host_pages * state.tree.page_size
    count(state, "load_tokens_planned", loaded)
    draft.loaded += loaded
    draft.orders.append(
        PageLoad(
            request_id=request.request_id,
            attempt=request.attempt,
            storage_id=storage.storage_id,
            host_pages=b"".join(node.host[storage.storage_id] for node in found.host),
            device_pages=fresh[:offset],
            identities=b"".join(page_identities(state.tree, node) for node in found.host),
        )
    )
    draft.loads.append(
        Load(request.request_id, request.attempt, deepest.id, storage.storage_id, depth=found.host[0].depth)
    )


def _send(turn: Turn, request: Request, worker: Worker, found: Reach) -> None:
    state, submit = turn.state, request.submit
    page_size = state.tree.page_size
    device_hit, loaded_hit = found.device_pages * page_size, (found.joined_pages + found.host_pages) * page_size
    count(state, "hit_tokens_device", device_hit)
    count(state, "hit_tokens_host", loaded_hit)
    if found.joined:
        count(state, "bundle_hits")
        count(state, "bundle_hit_tokens", found.joined_pages * page_size)
    # Usage speaks of the caller's prompt; a resumed request may also find its own earlier output.
    device_tokens = min(device_hit, submit.prompt_tokens)
    turn.to_worker(
        worker,
        AdmitRequest(
            request_id=request.request_id,
            attempt=request.attempt,
            gateway_id=submit.gateway_id,
            tokens=request.tokens,
            prompt_tokens=submit.prompt_tokens,
            sampling=submit.sampling,
            pages=request.pages,
            cached_tokens=device_hit + loaded_hit,
            device_tokens=device_tokens,
            host_tokens=min(device_hit + loaded_hit, submit.prompt_tokens) - device_tokens,
            received_ns=submit.received_ns,
            accepted_ns=request.accepted_ns,
        ),
    )
