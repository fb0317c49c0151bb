"""FlushCache: drop what nothing uses."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from services.scheduler.core.cache.pins import pinned_nodes
from services.scheduler.core.cache.prefix_tree import Node, descendants_first
from services.scheduler.core.cache.residency import (
    DEVICE,
    HOST,
    drop_device,
    drop_host,
    is_device_evictable,
    is_host_evictable,
)
from services.scheduler.core.restoring.fetches import cancel_fetches
from services.scheduler.core.tiers.saves import forget_taken
from shared.messages.storage_plans import DropChunks

if TYPE_CHECKING:
    from services.scheduler.core.state import CellState, Worker
    from services.scheduler.core.step import Step
    from shared.messages.cell_events import FlushCache

_LOWER_TIERS = ("disk", "remote")


def flush(step: Step, message: FlushCache) -> None:
    """Drop every unlocked page of the named tiers and namespace that no pin is for, without backing anything up."""
    lower = tuple(tier for tier in _LOWER_TIERS if tier in message.tiers)
    if lower:
        _flush_lower(step, message.namespace, lower)
    tree = step.state.tree
    roots = [message.namespace] if message.namespace else list(tree.roots)
    for namespace in roots:
        root_id = tree.roots.get(namespace)
        if root_id is None:
            continue
        order = [node.id for node in descendants_first(tree, tree.nodes[root_id]) if node.parent]
        if DEVICE in message.tiers:
            _flush_device(step, order)
        if HOST in message.tiers:
            _flush_host(step, order)


def _flush_lower(step: Step, namespace: str, tiers: tuple[str, ...]) -> None:
    """Have the storages delete chunks; the catalogue follows when they say that they did."""
    cancel_fetches(step, namespace)
    for storage in step.state.storages.values():
        if storage.disk_bytes or storage.has_remote:
            forget_taken(step.state, storage)
            step.to_storage(storage, DropChunks(namespace=namespace, tiers=tiers))


def _flush_device(step: Step, order: list[int]) -> None:
    state = step.state
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
                state.count("flushed_pages_device", drop_device(state, node, worker, "flushed"))


def _has_copy(state: CellState, node: Node, worker: Worker) -> bool:
    return any(storage.node == worker.node and storage.storage_id in node.host for storage in state.storages.values())


def _flush_host(step: Step, order: list[int]) -> None:
    state = step.state
    for node_id in order:
        for storage in state.storages.values():
            node = state.tree.nodes.get(node_id)
            if node is not None and is_host_evictable(node, storage.storage_id):
                state.count("flushed_pages_host", drop_host(state, node, storage, "flushed"))
