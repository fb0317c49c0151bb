"""A pool is gone with its worker or its storage: the tree forgets what it held."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.empty_map import without_entry
from services.scheduler.core.cache.pins import forget_hold
from services.scheduler.core.cache.residency import DEVICE, HOST, forget_order, remove_all

if TYPE_CHECKING:
    from services.scheduler.core.state import CellState


def strike_device(state: CellState, worker_id: str) -> None:
    """A worker's pool is gone: forget what it held, and remove what is resident nowhere then.

    Goes down only where the pool held something, so it costs in proportion to that and to the children of it.
    """
    nodes = state.tree.nodes
    homeless = []
    stack = [nodes[root_id] for root_id in state.tree.roots.values()]
    while stack:
        node = stack.pop()
        if worker_id in node.below:
            stack += [
                child
                for child in map(nodes.__getitem__, node.children.values())
                if worker_id in child.device or worker_id in child.loading
            ]
            node.below = without_entry(node.below, worker_id)
        if worker_id in node.device:
            node.device = without_entry(node.device, worker_id)
        if worker_id in node.loading:
            node.loading = without_entry(node.loading, worker_id)
        if worker_id in node.locks:
            node.locks = without_entry(node.locks, worker_id)
        if node.parent and not (node.device or node.loading or node.host):
            homeless.append(node)
    forget_order(state, DEVICE, worker_id)
    remove_all(state, homeless)


def strike_host(state: CellState, storage_id: str) -> None:
    """A storage's pool is gone: forget what it held, and remove what is resident nowhere then."""
    forget_hold(state, storage_id)
    homeless = []
    for node in state.tree.nodes.values():
        if storage_id not in node.host:
            continue  # Then no load reads it there either, and it is in no quarantine.
        node.host = without_entry(node.host, storage_id)
        if storage_id in node.host_locks:
            node.host_locks = without_entry(node.host_locks, storage_id)
        if storage_id in node.quarantined:
            node.quarantined = tuple(name for name in node.quarantined if name != storage_id)
        if not (node.device or node.loading or node.host):
            homeless.append(node)
    forget_order(state, HOST, storage_id)
    remove_all(state, homeless)
