"""Loads, host to device: settled when the batch that carried them is answered."""

from __future__ import annotations

from services.scheduler.core.page_pool import release
from services.scheduler.core.prefix_tree import Node, page_count
from services.scheduler.core.residency import (
    cancel_loading,
    finish_loading,
    lock_path,
    prune,
    quarantine,
    unlock_host,
    unlock_path,
)
from services.scheduler.core.state import CellState, Load, Request, Storage, Worker, count
from services.scheduler.core.turn import Turn
from shared.messages.base import unpack_int32
from shared.messages.worker_events import BatchDone


def settle_load(turn: Turn, worker: Worker, load: Load, message: BatchDone) -> None:
    """The batch of a load was executed: its nodes are on the device, or the load failed as a whole."""
    if load.is_orphaned or load.request_id in message.failed:
        bad = [
            failure.host_pages[: len(failure.host_pages) // 4 * 4]
            for failure in message.load_failures
            if failure.storage_id == load.storage_id
        ]
        _fail(turn, worker, load, b"".join(bad))
    else:
        _succeed(turn.state, worker, load)


def settle_loads_of(turn: Turn, worker: Worker, request: Request, *, is_proven: bool) -> None:
    """A request leaves its worker before its load was reported.

    Proven, the load is over and good. Otherwise the worker may still be copying: the pages stay untouched until
    the batch is answered, and then nothing vouches for what is in them.
    """
    for batch in worker.batches:
        for load in list(batch.loads):
            if load.request_id != request.request_id or load.attempt != request.attempt:
                continue
            if is_proven:
                batch.loads.remove(load)
                _succeed(turn.state, worker, load)
            else:
                load.is_orphaned = True


def _succeed(state: CellState, worker: Worker, load: Load) -> None:
    storage = state.storages.get(load.storage_id)
    for node in reversed(loading_nodes(state, worker, load)):
        finish_loading(state, node, worker)
        if storage is not None:
            unlock_host(state, node, storage)


def _fail(turn: Turn, worker: Worker, load: Load, bad_pages: bytes) -> None:
    """Undo a load. Copies that failed verification are quarantined."""
    state = turn.state
    count(state, "loads_failed")
    nodes = loading_nodes(state, worker, load)
    request = state.requests.get(load.request_id)
    if request is not None and request.attempt == load.attempt and not load.is_orphaned:
        _give_back_to_request(state, worker, request, nodes)
    else:
        for node in nodes:
            release(worker.pool, cancel_loading(state, node, worker))
    storage = state.storages.get(load.storage_id)
    if storage is not None:
        _release_host(state, nodes, storage, bad_pages)
    for node in nodes:
        if node.id in state.tree.nodes:
            prune(state, node)


def _give_back_to_request(state: CellState, worker: Worker, request: Request, nodes: list[Node]) -> None:
    """The worker still has these pages in the request's table: they are private until it has let go of it."""
    if not nodes:
        return
    unlock_path(state, state.tree.nodes[request.node], worker)
    above = state.tree.nodes[nodes[-1].parent]
    request.node = above.id if above.parent else 0
    if request.node:
        lock_path(state, above, worker)
    for node in nodes:
        cancel_loading(state, node, worker)
        request.shared -= page_count(state.tree, node)


def _release_host(state: CellState, nodes: list[Node], storage: Storage, bad_pages: bytes) -> None:
    bad = dict.fromkeys(unpack_int32(bad_pages))
    for node in nodes:
        held = node.host.get(storage.storage_id, b"")
        if any(page in bad for page in unpack_int32(held)) if bad else False:
            count(state, "quarantined_pages", len(held) // 4)
            quarantine(state, node, storage)
        unlock_host(state, node, storage)


def loading_nodes(state: CellState, worker: Worker, load: Load) -> list[Node]:
    """The nodes that a load fills, lowest first. Does not mutate."""
    nodes = []
    node = state.tree.nodes[load.node]
    while worker.worker_id in node.loading:
        nodes.append(node)
        node = state.tree.nodes[node.parent]
    return nodes
