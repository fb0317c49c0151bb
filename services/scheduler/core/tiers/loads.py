"""Loads, to a device from host memory or a neighbour's device: settled when the batch that carried them is answered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.prefix_tree import PAGE_NUMBER_BYTES, Node, page_count
from services.scheduler.core.cache.residency import (
    cancel_loading,
    finish_loading,
    lock_path,
    prune,
    quarantine,
    unlock_host,
    unlock_path,
)
from services.scheduler.core.lifecycle import ADMITTED
from services.scheduler.core.tiers.neighbours import distrust, release_neighbour
from shared.messages.base import unpack_int32

if TYPE_CHECKING:
    from services.scheduler.core.request import Request
    from services.scheduler.core.state import CellState, Storage, Worker
    from services.scheduler.core.step import Step
    from services.scheduler.core.tiers.under_way import Batch, Load
    from shared.messages.worker_events import BatchDone


def settle_loads(step: Step, worker: Worker, batch: Batch, message: BatchDone) -> None:
    """The batch of these loads was executed: what its chunks prove is on the device, and the rest has failed.

    A chunk that was computed proves everything that its request stands on, its own loads and those of others
    that it joined. A load that stands on another comes after it in the batch.
    """
    state = step.state
    if not batch.loads:
        return
    standing = _standing_requests(state, worker, batch)
    for request in standing:
        if request.request_id not in message.failed:
            _finish(step, worker, batch, loading_upwards(state, worker, request.node) if request.node else [])
    for failure in message.load_failures:
        if any(load.neighbour_id == failure.neighbour_id != "" for load in batch.loads):
            distrust(state, worker, failure.neighbour_id)
    for load in reversed(batch.loads):
        nodes = loading_nodes(state, worker, load)
        if nodes:
            bad = [
                failure.host_pages[: len(failure.host_pages) // 4 * 4]
                for failure in message.load_failures
                if failure.storage_id == load.storage_id and not failure.neighbour_id
            ]
            _fail(step, worker, load, nodes, standing, b"".join(bad))


def settle_loads_of(step: Step, worker: Worker, request: Request, *, is_proven: bool) -> None:
    """A request leaves its worker before the batch with the loads that it stands on was reported.

    Proven, they are over and good as far as it stands on them. Otherwise the worker may still be copying: the
    pages of its own load stay untouched until the batch is answered, and then nobody of its own vouches for them.
    """
    for batch in worker.batches:
        if is_proven:
            if batch.loads and request.node:
                _finish(step, worker, batch, loading_upwards(step.state, worker, request.node))
            continue
        for load in batch.loads:
            if load.request_id == request.request_id and load.attempt == request.attempt:
                load.is_orphaned = True


def _standing_requests(state: CellState, worker: Worker, batch: Batch) -> list[Request]:
    """The requests of a batch whose attempt still runs on this worker."""
    found = []
    for chunk in batch.chunks:
        request = state.requests.get(chunk.request_id)
        if request is not None and request.attempt == chunk.attempt and request.state in ADMITTED:
            found.append(request)
    return found


def _finish(step: Step, worker: Worker, batch: Batch, proven: list[Node]) -> None:
    """These nodes are on the device now; loads of which nothing is left are over."""
    state = step.state
    known = dict.fromkeys(node.id for node in proven)
    for load in batch.loads:
        storage = state.storages.get(load.storage_id)
        for node in reversed(loading_nodes(state, worker, load)):
            if node.id in known:
                finish_loading(state, node, worker)
                if storage is not None:
                    unlock_host(state, node, storage)
    over = [load for load in batch.loads if worker.worker_id not in state.tree.nodes[load.node].loading]
    for load in over:
        release_neighbour(step, load)
    if over:
        batch.loads = [load for load in batch.loads if worker.worker_id in state.tree.nodes[load.node].loading]


def _fail(step: Step, worker: Worker, load: Load, nodes: list[Node], standing: list[Request], bad_pages: bytes) -> None:
    """Undo what is left of a load. Copies that failed verification are quarantined.

    Whoever stands on it is about to be preempted. The pages go to the request that the load was for, which gives
    them back when its worker has let go of it, or back to the pool: plans are executed in order, so nothing writes
    to them before the worker has forgotten the others too.
    """
    state = step.state
    state.count("loads_failed")
    owner: Request | None = None
    for request in standing:
        is_owner = request.request_id == load.request_id and request.attempt == load.attempt and not load.is_orphaned
        _step_back(state, worker, request, nodes, keeps_pages=is_owner)
        owner = request if is_owner else owner
    for node in nodes:
        pages = cancel_loading(state, node, worker)
        if owner is None:
            worker.pool.release(pages)
    release_neighbour(step, load)
    storage = state.storages.get(load.storage_id)
    if storage is not None:
        release_host(state, nodes, storage, bad_pages)
    for node in nodes:
        if node.id in state.tree.nodes:
            prune(state, node)


def _step_back(state: CellState, worker: Worker, request: Request, failed: list[Node], *, keeps_pages: bool) -> None:
    """A request stands on a failed load no more. What it keeps of its pages is private from now on."""
    known = dict.fromkeys(node.id for node in failed)
    path = loading_upwards(state, worker, request.node) if request.node else []
    lost = [node for node in path if node.id in known]
    if not lost:
        return
    top = lost[-1]
    unlock_path(state, state.tree.nodes[request.node], worker)
    above = state.tree.nodes[top.parent]
    request.node = above.id if above.parent else 0
    if request.node:
        lock_path(state, above, worker)
    pages = sum(page_count(state.tree, node) for node in lost)
    request.shared -= pages
    if not keeps_pages:
        first = top.depth // state.tree.page_size
        request.pages = (
            request.pages[: first * PAGE_NUMBER_BYTES] + request.pages[(first + pages) * PAGE_NUMBER_BYTES :]
        )


def release_host(state: CellState, nodes: list[Node], storage: Storage, bad_pages: bytes) -> None:
    """Unlock the host copies that a copy up read, lowest first, and quarantine those with bad pages (packed)."""
    bad = dict.fromkeys(unpack_int32(bad_pages))
    for node in nodes:
        held = node.host.get(storage.storage_id, b"")
        if any(page in bad for page in unpack_int32(held)) if bad else False:
            state.count("quarantined_pages", len(held) // 4)
            quarantine(state, node, storage)
        unlock_host(state, node, storage)


def loading_nodes(state: CellState, worker: Worker, load: Load) -> list[Node]:
    """The nodes that a load fills, lowest first. Does not mutate."""
    return [node for node in loading_upwards(state, worker, load.node) if node.depth >= load.depth]


def copies_up(state: CellState, worker: Worker) -> list[tuple[str, list[Node]]]:
    """What each load of the worker and its promotion fill, lowest first, and from which storage. Does not mutate."""
    found = [(load.storage_id, loading_nodes(state, worker, load)) for batch in worker.batches for load in batch.loads]
    if worker.promotion is not None:
        nodes = [node for node_id in worker.promotion.nodes for node in loading_upwards(state, worker, node_id)]
        found.append((worker.promotion.storage_id, nodes))
    return found


def loading_upwards(state: CellState, worker: Worker, node_id: int) -> list[Node]:
    """This node and those above it, as far as they are loading on the worker, lowest first. Does not mutate."""
    nodes = []
    node = state.tree.nodes[node_id]
    while worker.worker_id in node.loading:
        nodes.append(node)
        node = state.tree.nodes[node.parent]
    return nodes
