"""Admission to a worker: match, lock, make room, allocate, and send the AdmitRequest.

The order gives the sources of a hit's tokens, for usage and counters: neighbours, other nodes, disk, object store.
"""

from __future__ import annotations

from itertools import dropwhile
from operator import itemgetter
from typing import TYPE_CHECKING

from services.scheduler.core.cache.eviction_orders import visit
from services.scheduler.core.cache.hotness.tracking import request_admitted
from services.scheduler.core.cache.identities import page_identities
from services.scheduler.core.cache.leasing import answers_to, grant_leases
from services.scheduler.core.cache.prefix_match import PrefixMatch, matched_path, reach
from services.scheduler.core.cache.prefix_tree import PAGE_NUMBER_BYTES, Path, device_pages_of, page_count, way_to
from services.scheduler.core.cache.residency import (
    begin_loading,
    lock_host,
    lock_path,
    split_node,
    touch_locked,
    unlock_host,
    unlock_path,
)
from services.scheduler.core.explain.explanations import note_admission
from services.scheduler.core.hidden.hidden_leases import open_lease
from services.scheduler.core.hidden.restorations import keep_usable_run
from services.scheduler.core.kept_texts import NO_REFERENCE, Reference, all_digests, refer
from services.scheduler.core.lifecycle import RequestEvent, WaitEvent, next_state
from services.scheduler.core.rates import count_saved_prefill
from services.scheduler.core.sparse.sparse_prefixes import (
    begin_sparse,
    pages_for_chosen,
    pages_spared,
    span_for,
    sparse_order,
)
from services.scheduler.core.tiers.making_room import make_room
from services.scheduler.core.tiers.under_way import Load, StoreLacks
from services.scheduler.core.waiting.fair_share import serve
from services.scheduler.core.waiting.waits import (
    announce,
    count_waiting,
    forget_deferral,
    forget_fetch_waits,
    let_go_of_fetch,
    withdraw,
)
from shared.compact_messages import compact_admission
from shared.ids import TOKEN_BYTES
from shared.messages.worker_plans import AdmitRequest, PageLoad
from shared.prompt_chain import block_digests

if TYPE_CHECKING:
    from services.scheduler.core.cache.prefix_match import PrefixMatch
    from services.scheduler.core.cache.prefix_tree import Node
    from services.scheduler.core.queue.batch_builder import BatchBuilder, Candidate
    from services.scheduler.core.request import Request
    from services.scheduler.core.sparse.sparse_records import SparseSpan
    from services.scheduler.core.state import CellState, Worker
    from services.scheduler.core.step import Step


_PAGES = itemgetter(1)  # Pages of an entry of a path.

_GROWTH = 2
"""Factor of a lease over the tokens generated so far, and of the first lease over the least."""

_MOST_LEASES = 8
"""Largest lease at once, in least leases."""

_UNUSED_SHARE = 2
"""One page in so many must be free or evictable for leases to exceed the least."""


def try_admit(step: Step, candidate: Candidate, worker: Worker, builder: BatchBuilder) -> bool:
    """Admit a WAITING request if its pages can be had now; return whether it was. Its load, if any, joins the batch."""
    state, request = step.state, candidate.request
    path, found = candidate.path, candidate.found
    if candidate.stage != builder.stage:  # Another admission may have evicted, cut or begun to load what it matched.
        path = matched_path(state, request)
        found = reach(state, path, worker, builder.loading)
    choice = request.sparse.choice
    span = None if choice is None else span_for(state, request, worker, found.pages * state.tree.page_size)
    fresh = _fresh_pages(state, worker, request, found, span)
    name = worker.worker_id  # All above a locked node is locked.
    locked_anew = sum(map(_PAGES, dropwhile(lambda each: name in each[0].locks, path[: len(found.device)])))
    if not worker.pool.can_free(fresh + locked_anew):
        return False
    upper = cut_to_fit(state, path, found)
    if upper is not None and found.joined and not found.loaded:
        builder.loading[upper.id] = found.sources[-1]
    _hold(state, found, worker)
    owner = state.tree.owner_of(request.submit.namespace)
    has_room = worker.pool.free >= fresh or make_room(step, worker, fresh, owner)
    pages = worker.pool.allocate(fresh) if has_room else None
    if pages is None:
        _let_go(state, found, worker)
        return False
    follow_cuts(state, found)
    if state.recollection is not None:
        note_admission(step, state.recollection, request, worker, path, found, span)
    _take_over(step, request, worker, found, pages, span)
    if found.loaded or found.joined or span is not None:
        builder.standing[request.request_id] = None
    if found.loaded:
        _begin_loads(step, request, worker, found, pages, builder)
    _send(step, request, worker, found)
    builder.stage += 1
    builder.places -= 1
    return True


def _fresh_pages(
    state: CellState, worker: Worker, request: Request, found: PrefixMatch, span: SparseSpan | None
) -> int:
    """Return how many pages a request needs beside shared ones: to load, choose, compute and decode."""
    known = request.token_count
    tokens = known + first_lease(state, worker, request, known)
    fresh = -(-tokens // state.tree.page_size) - found.device_pages - found.joined_pages
    if span is None:
        return fresh
    page_size = state.tree.page_size
    chosen = pages_for_chosen(span, request.submit.cache.importance, page_size)
    return fresh - pages_spared(span, page_size) + chosen


def decode_room(state: CellState, worker: Worker, generated: int) -> int:
    """Return for how many tokens beyond ``generated`` output tokens a request gets pages at once. Changes nothing."""
    least, pool = state.config.lease_tokens, worker.pool
    if (pool.free + pool.cached - pool.locked) * _UNUSED_SHARE < pool.total:
        return least
    return min(_GROWTH * max(least, generated), _MOST_LEASES * least)


def first_lease(state: CellState, worker: Worker, request: Request, known: int) -> int:
    """Return for how many decode tokens a request of ``known`` tokens gets pages when it is admitted."""
    generated = len(request.output) // TOKEN_BYTES
    return min(decode_room(state, worker, generated), request.max_tokens_total - known)


def _hold(state: CellState, found: PrefixMatch, worker: Worker) -> None:
    """Lock the matched nodes, so that making room for the rest does not evict them."""
    held = found.deepest_held
    if held is not None:
        lock_path(state, held, worker)
    storage_id = state.storage_id_of(worker)
    for source, nodes in found.loads:
        if source:
            lock_path(state, nodes[-1], state.workers[source])
        else:
            for node in nodes:
                lock_host(node, storage_id)


def _let_go(state: CellState, found: PrefixMatch, worker: Worker) -> None:
    held = found.deepest_held
    if held is not None:
        unlock_path(state, held, worker)
    storage = state.storage_of(worker) if state.storages else None
    for source, nodes in reversed(found.loads):
        if source:
            unlock_path(state, nodes[-1], state.workers[source])
        elif storage is not None:
            for node in reversed(nodes):
                unlock_host(state, node, storage)


def _take_over(
    step: Step, request: Request, worker: Worker, found: PrefixMatch, fresh: bytes, span: SparseSpan | None
) -> None:
    """Record where the request runs and which pages it owns."""
    state = step.state
    request.sparse.choice = None
    own = fresh if span is None else begin_sparse(state, request, worker, span, fresh, found.loaded_pages)
    cached = found.pages * state.tree.page_size if span is None else span.end
    uncached = request.token_count - cached
    admitted_from_queue(step, request, worker, uncached)
    request.state = next_state(request.state, RequestEvent.ADMIT)
    request.worker_id = worker.worker_id
    name = worker.worker_id
    shared = [node.loading_pages(name) for node in found.joined]
    if found.device:
        shared.insert(0, device_pages_of(state.tree, found.device, name))
    request.pages = b"".join((*shared, own))
    request.shared = found.pages
    held = found.deepest_held
    request.node = held.id if held is not None else 0
    request.planned = request.computed = cached
    if request.hidden.run is not None:
        keep_usable_run(state, request, cached)
    request.is_poisoned = False
    request.lease_generated = -1
    worker.work.running.append(request.request_id)
    worker.work.unplanned += uncached
    if span is None:
        announce(state, request, uncached)
    else:
        withdraw(state, request)
    reused = found.nodes
    for node in reused:
        node.hits += 1
    touch_locked(state, reused, worker, step.seq)
    state.admissions += 1
    request.admission = state.admissions
    request_admitted(step, reused)
    visit(state, worker.worker_id, state.storage_id_of(worker), reused, request.token_count)
    if request.submit.cache.leases or state.cache_leases.nodes or state.returns:
        grant_leases(step, request, reused)


def _begin_loads(
    step: Step, request: Request, worker: Worker, found: PrefixMatch, fresh: bytes, builder: BatchBuilder
) -> None:
    """Give the matched nodes the first of the fresh pages, and order the copies that fill them.

    The locks of :func:`_hold` stay on the copies that are read until the load is settled.
    """
    state = step.state
    storage_id = state.storage_id_of(worker)
    offset = 0
    for source, nodes in found.loads:
        start = offset
        for node in nodes:
            size = page_count(state.tree, node) * PAGE_NUMBER_BYTES
            begin_loading(state, node, worker, fresh[offset : offset + size])
            builder.loading[node.id] = source
            offset += size
        order = PageLoad(
            request_id=request.request_id,
            attempt=request.attempt,
            storage_id="" if source else storage_id,
            host_pages=b"".join(node.device_pages(source) if source else node.host_pages(storage_id) for node in nodes),
            device_pages=fresh[start:offset],
            identities=b"".join(page_identities(state.tree, node) for node in nodes),
            neighbour_id=source,
            neighbour_incarnation=state.workers[source].incarnation if source else "",
        )
        builder.orders.append(order)
        builder.loads.append(
            Load(
                request.request_id,
                request.attempt,
                nodes[-1].id,
                order.storage_id,
                depth=nodes[0].depth,
                neighbour_id=source,
            )
        )
        state.count("neighbour_loads_started" if source else "loads_started")
    deepest = found.loaded[-1]
    held = found.deepest_held
    if held is not None:
        unlock_path(state, held, worker)
    lock_path(state, deepest, worker)
    request.node = deepest.id
    loaded = found.loaded_pages * state.tree.page_size
    state.count("load_tokens_planned", loaded)
    builder.loaded += loaded


def _send(step: Step, request: Request, worker: Worker, found: PrefixMatch) -> None:
    state, submit = step.state, request.submit
    storage = state.storage_of(worker) if state.storages else None
    page_size = state.tree.page_size
    device_hit, loaded_hit = found.device_pages * page_size, (found.joined_pages + found.loaded_pages) * page_size
    neighbour_hit = found.neighbour_pages * page_size
    lent_hit, disk_hit, remote_hit = fetched_tokens(request, device_hit, device_hit + loaded_hit, neighbour_hit)
    state.count("hit_tokens_device", device_hit)
    if device_hit or loaded_hit:
        count_saved_prefill(state, worker, device_hit + loaded_hit)
    state.count("hit_tokens_host", loaded_hit - neighbour_hit - lent_hit - disk_hit - remote_hit)
    if neighbour_hit:
        state.count("hit_tokens_neighbour", neighbour_hit)
    if lent_hit:
        state.count("hit_tokens_lent", lent_hit)
    if disk_hit or remote_hit:
        state.count("hit_tokens_disk", disk_hit)
        state.count("hit_tokens_remote", remote_hit)
    if found.joined:
        state.count("bundle_hits")
        state.count("bundle_hit_tokens", found.joined_pages * page_size)
    # Usage is about the caller's prompt; a resumed request may also match its own earlier output.
    prompt_tokens = submit.prompt_tokens
    device_tokens = min(device_hit, prompt_tokens)
    loaded_tokens = min(device_hit + loaded_hit, prompt_tokens) - device_tokens
    neighbour_tokens = neighbour_tokens_of(found, prompt_tokens) if found.neighbour_pages else 0
    lent_tokens, disk_tokens, remote_tokens = fetched_tokens(
        request, device_tokens, device_tokens + loaded_tokens, neighbour_tokens
    )
    request.prefetch.forget_brought()
    request.prefetch.lacks = StoreLacks()
    tokens, pages = request.tokens, request.pages
    said = _reference(worker, request, len(tokens) // TOKEN_BYTES)
    if said.base is not None:
        state.count("referred_tokens", said.base.tokens)
        tokens, pages = tokens[said.base.tokens * TOKEN_BYTES :], pages[said.base.pages * PAGE_NUMBER_BYTES :]
    order = AdmitRequest(
        request_id=request.request_id,
        attempt=request.attempt,
        gateway_id=submit.gateway_id,
        tokens=tokens,
        prompt_tokens=prompt_tokens,
        sampling=submit.sampling,
        pages=pages,
        cached_tokens=device_hit + loaded_hit if request.sparse.span is None else request.sparse.span.end,
        device_tokens=device_tokens,
        host_tokens=loaded_tokens - neighbour_tokens - lent_tokens - disk_tokens - remote_tokens,
        disk_tokens=disk_tokens,
        remote_tokens=remote_tokens,
        neighbour_tokens=neighbour_tokens,
        received_ns=submit.received_ns,
        accepted_ns=request.accepted_ns,
        hidden_lease=None if storage is None or storage.hidden.pool is None else open_lease(step, request, worker),
        sparse=None if request.sparse.span is None else sparse_order(request),
        trace=submit.trace,
        leases=answers_to(state, request) if submit.cache.leases else (),
        base=said.base,
        text=said.text,
        dropped=said.dropped,
        lent_tokens=lent_tokens,
        adapter=submit.adapter,
    )
    step.to_worker(worker, compact_admission(order) if worker.takes_compact else order)


def _reference(worker: Worker, request: Request, tokens: int) -> Reference:
    """Return which of the ``tokens`` the worker keeps already, and the text that it is to keep."""
    if not worker.texts.most_tokens:
        return NO_REFERENCE
    blocks, submit = request.match.blocks, request.submit
    digests = all_digests(worker.texts, blocks.digests, blocks.above)
    return refer(worker.texts, digests or block_digests(submit.namespace, submit.prompt), tokens, request.pages)


def cut_to_fit(state: CellState, path: Path, found: PrefixMatch) -> Node | None:
    """Split the last node of the match where only a part of it is used, so that whole nodes are used.

    Changes tree and match. Returns the new upper part, or None.
    """
    used = len(found.device) + len(found.joined) + len(found.loaded)
    if not used:
        return None
    node, pages = path[used - 1]
    if pages == page_count(state.tree, node):
        return None
    upper = split_node(state, node, pages)
    (found.loaded or found.joined or found.device)[-1] = upper
    return upper


def follow_cuts(state: CellState, found: PrefixMatch) -> None:
    """Add the upper parts of matched nodes that were cut since, while ``found`` was locked. Changes only ``found``.

    Only nodes that were on the device before can have been cut: making room for a backup may cut a node with a copy in
    the host pool. The copy of a node being loaded is read, so that it is not cut.
    """
    if found.device:
        found.device = way_to(state.tree, found.device[-1]).nodes.copy()


def neighbour_tokens_of(found: PrefixMatch, prompt_tokens: int) -> int:
    """Return how many tokens of the prompt are copied from neighbours."""
    spans = [
        (node.depth, node.end)
        for node, source in zip([*found.joined, *found.loaded], found.sources, strict=True)
        if source
    ]
    return sum(max(0, min(end, prompt_tokens) - start) for start, end in spans)


def fetched_tokens(request: Request, start: int, end: int, elsewhere: int) -> tuple[int, int, int]:
    """Return how many of the loaded tokens [start, end) were fetched for this request, by source.

    From other nodes, from disk and from the object store. ``elsewhere`` of them are copied from neighbours.
    """
    fetched = max(0, min(end, request.prefetch.brought_to) - max(start, request.prefetch.brought_from))
    fetched = min(fetched, end - start - elsewhere)
    lent = min(fetched, request.prefetch.brought_lent)
    remote = min(fetched - lent, request.prefetch.brought_remote)
    return lent, fetched - lent - remote, remote


def admitted_from_queue(step: Step, request: Request, worker: Worker, uncached: int) -> None:
    """Take a ready request off its worker's queue, to compute ``uncached`` tokens there.

    Requests that wait for these tokens go on waiting: it is about to compute them.
    """
    state = step.state
    serve(worker, request, uncached)
    request.advance_wait(WaitEvent.ADMITTED)
    let_go_of_fetch(state, request)  # Chunks that have not arrived by now are computed.
    forget_deferral(step, request)
    forget_fetch_waits(step, request)
    worker.line.cost -= request.place.cost
    request.place.cost = request.place.uncached = 0
    count_waiting(state, request, -1)
