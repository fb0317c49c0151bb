"""FlushCache: drop what nothing uses."""

from __future__ import annotations

from collections import defaultdict

from services.scheduler.core.fetches import cancel_fetches
from services.scheduler.core.pins import pinned_nodes
from services.scheduler.core.prefix_tree import Node, descendants_first
from services.scheduler.core.residency import (
    DEVICE,
    HOST,
    drop_device,
    drop_host,
    is_device_evictable,
    is_host_evictable,
)
from services.scheduler.core.saves import forget_taken
from services.scheduler.core.state import CellState, Worker, count
from services.scheduler.core.turn import Turn
from shared.messages.cell_events import FlushCache
from shared.messages.storage_plans import DropChunks

_LOWER_TIERS = ("disk", "remote")


def flush(turn: Turn, message: FlushCache) -> None:
    """Drop every unlocked page of the named tiers and namespace that no pin is for, without backing anything up."""
    lower = tuple(tier for tier in _LOWER_TIERS if tier in message.tiers)
    if lower:
        _flush_lower(turn, message.namespace, lower)
    tree = turn.state.tree
    roots = [message.namespace] if message.namespace else list(tree.roots)
    for namespace in roots:
        root_id = tree.roots.get(namespace)
        if root_id is None:
            continue
        order = [node.id for node in descendants_first(tree, tree.nodes[root_id]) if node.parent]
        if DEVICE in message.tiers:
            _flush_device(turn, order)
        if HOST in message.tiers:
            _flush_host(turn, order)


def _flush_lower(turn: Turn, namespace: str, tiers: tuple[str, ...]) -> None:
    """Have the storages delete chunks; the catalogue follows when they say that they did."""
    cancel_fetches(turn, namespace)
    for storage in turn.state.storages.values():
        if storage.disk_bytes or storage.has_remote:
            forget_taken(turn.state, storage)
            turn.to_storage(storage, DropChunks(namespace=namespace, tiers=tiers))


def _flush_device(turn: Turn, order: list[int]) -> None:
    state = turn.state
    # What a pin waits for gets its copy when it is evicted. Dropped without one, there would be nothing to keep.
    awaited: defaultdict[str, set[int]] = defaultdict(set)
    for storage in state.storages.values():
        awaited[storage.node] |= pinned_nodes(state, storage)
    for node_id in order:
        for worker in state.workers.values():
            node = state.tree.nodes.get(node_id)
            if node is None or not is_device_evictable(state, node, worker.worker_id):
                continue
            if node_id not in awaited[worker.node] or _has_copy(state, node, worker):
                count(state, "flushed_pages_device", drop_device(state, node, worker, "flushed"))


def _has_copy(state: CellState, node: Node, worker: Worker) -> bool:
    return any(storage.node == worker.node and storage.storage_id in node.host for storage in state.storages.values())


def _flush_host(turn: Turn, order: list[int]) -> None:
    state = turn.state
    for node_id in order:
        for storage in state.storages.values():
            node = state.tree.nodes.get(node_id)
            if node is not None and is_host_evictable(node, storage.storage_id):
                count(state, "flushed_pages_host", drop_host(state, node, storage, "flushed"))
