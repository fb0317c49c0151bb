"""Who holds a node: pages per pool, locks per worker, and what may therefore be evicted.

All changes of ``device``, ``loading``, ``host``, ``locks`` and ``host_locks`` happen here, so that the pools'
counts, the parents' ``below`` and the victim queues always agree with them.

Rules that hold between steps:

* what is on a worker's device is closed upwards: so is the parent, and what is loading has a parent that is
  on the device or loading;
* every node but a root is resident somewhere: on a device, loading, or in a host pool;
* a node goes from a device only when it is unlocked, no child is on that device, and no backup reads it;
* a host copy goes only when no load reads it, and the node is also on a device or has no children.
"""

from __future__ import annotations

from typing import TypeVar

from services.scheduler.core.eviction import POLICIES
from services.scheduler.core.eviction.policy import Priority
from services.scheduler.core.page_pool import PagePool, release
from services.scheduler.core.prefix_tree import (
    Node,
    ancestors,
    descendants_first,
    page_count,
    remove_leaf,
    split,
)
from services.scheduler.core.state import CellState, Storage, Worker
from shared.errors import InvariantViolated

V = TypeVar("V")

DEVICE = "device"
HOST = "host"


def host_pool(storage: Storage) -> PagePool:
    """The pool of a storage that must have one."""
    if storage.pool is None:
        raise InvariantViolated(f"storage {storage.storage_id} has no host pool")
    return storage.pool


def is_device_evictable(state: CellState, node: Node, worker_id: str) -> bool:
    """Whether this worker's pages of the node may be given up."""
    if worker_id not in node.device or node.locks.get(worker_id) or node.below.get(worker_id):
        return False
    return not node.transfer or state.transfers[node.transfer].worker_id != worker_id


def is_host_evictable(node: Node, storage_id: str) -> bool:
    """Whether this storage's copy of the node may be given up."""
    if storage_id not in node.host or node.host_locks.get(storage_id):
        return False
    return bool(node.device) or not node.children


def offer(state: CellState, node: Node) -> None:
    """Put a node into the queue of every pool from which it may be evicted."""
    priority: Priority | None = None
    for worker_id in node.device:
        if is_device_evictable(state, node, worker_id):
            priority = priority or POLICIES[state.policy].priority(node)
            state.victims.offer(DEVICE, worker_id, node.id, priority)
    for storage_id in node.host:
        if is_host_evictable(node, storage_id):
            priority = priority or POLICIES[state.policy].priority(node)
            state.victims.offer(HOST, storage_id, node.id, priority)


def offer_all(state: CellState) -> None:
    """Build the victim queues anew, after recovery or a change of policy."""
    state.victims.clear()
    for node in state.tree.nodes.values():
        offer(state, node)


def take_device_victim(state: CellState, worker_id: str) -> Node | None:
    """The next node to leave this worker's device. It leaves the queue, nothing else changes."""

    def current(node_id: int) -> Priority | None:
        node = state.tree.nodes.get(node_id)
        if node is None or not is_device_evictable(state, node, worker_id):
            return None
        return POLICIES[state.policy].priority(node)

    node_id = state.victims.take(DEVICE, worker_id, current)
    return None if node_id is None else state.tree.nodes[node_id]


def take_host_victim(state: CellState, storage_id: str) -> Node | None:
    """The next node to leave this storage's host pool. It leaves the queue, nothing else changes."""

    def current(node_id: int) -> Priority | None:
        node = state.tree.nodes.get(node_id)
        if node is None or not is_host_evictable(node, storage_id):
            return None
        return POLICIES[state.policy].priority(node)

    node_id = state.victims.take(HOST, storage_id, current)
    return None if node_id is None else state.tree.nodes[node_id]


def touch(state: CellState, node: Node, seq: int) -> None:
    """Mark a node as used now."""
    node.last_use = seq
    offer(state, node)


def lock_path(state: CellState, node: Node, worker: Worker) -> None:
    """Keep ``node`` and everything above it on this worker's device."""
    for held in ancestors(state.tree, node):
        locks = held.locks.get(worker.worker_id, 0)
        held.locks[worker.worker_id] = locks + 1
        if not locks and worker.worker_id in held.device:
            worker.pool.locked += page_count(state.tree, held)


def unlock_path(state: CellState, node: Node, worker: Worker) -> None:
    """Undo :func:`lock_path`."""
    for held in ancestors(state.tree, node):
        _unlock(state, held, worker)


def _unlock(state: CellState, node: Node, worker: Worker) -> None:
    locks = node.locks.get(worker.worker_id, 0)
    if locks < 1:
        raise InvariantViolated(f"node {node.id} was unlocked once too often for {worker.worker_id}")
    if locks > 1:
        node.locks[worker.worker_id] = locks - 1
        return
    node.locks = _without(node.locks, worker.worker_id)
    if worker.worker_id in node.device:
        worker.pool.locked -= page_count(state.tree, node)
        offer(state, node)


def lock_host(node: Node, storage_id: str) -> None:
    """Keep a host copy while a load reads it."""
    node.host_locks[storage_id] = node.host_locks.get(storage_id, 0) + 1


def unlock_host(state: CellState, node: Node, storage: Storage) -> None:
    """Undo :func:`lock_host`; a quarantined copy that nobody reads any more goes. May remove the node."""
    locks = node.host_locks[storage.storage_id] - 1
    if locks:
        node.host_locks[storage.storage_id] = locks
        return
    node.host_locks = _without(node.host_locks, storage.storage_id)
    if storage.storage_id in node.quarantined:
        drop_host(state, node, storage)
    else:
        offer(state, node)


def quarantine(state: CellState, node: Node, storage: Storage) -> None:
    """Never match this host copy again; drop it as soon as no load reads it. May remove the node."""
    if node.host_locks.get(storage.storage_id):
        if storage.storage_id not in node.quarantined:
            node.quarantined = (*node.quarantined, storage.storage_id)
    else:
        drop_host(state, node, storage)


def give_device(state: CellState, node: Node, worker: Worker, pages: bytes) -> None:
    """These pages of a worker, leased until now, hold the node's KV from now on."""
    node.device[worker.worker_id] = pages
    worker.pool.cached += len(pages) // 4
    if node.locks.get(worker.worker_id):
        worker.pool.locked += len(pages) // 4
    _count_below(state, node, worker.worker_id, 1)
    offer(state, node)


def drop_device(state: CellState, node: Node, worker: Worker) -> int:
    """Free this worker's pages of an evictable node; returns how many. May remove the node."""
    pages = node.device[worker.worker_id]
    node.device = _without(node.device, worker.worker_id)
    worker.pool.cached -= len(pages) // 4
    release(worker.pool, pages)
    parent = state.tree.nodes[node.parent]
    _count_below(state, node, worker.worker_id, -1)
    if not prune(state, node):
        offer(state, node)
        if parent.parent:
            offer(state, parent)
    return len(pages) // 4


def begin_loading(state: CellState, node: Node, worker: Worker, pages: bytes) -> None:
    """These leased pages will hold the node's KV when the load is done."""
    node.loading[worker.worker_id] = pages
    _count_below(state, node, worker.worker_id, 1)


def finish_loading(state: CellState, node: Node, worker: Worker) -> None:
    """The load is done: the node is on the device."""
    pages = node.loading[worker.worker_id]
    node.loading = _without(node.loading, worker.worker_id)
    _count_below(state, node, worker.worker_id, -1)
    give_device(state, node, worker, pages)


def cancel_loading(state: CellState, node: Node, worker: Worker) -> bytes:
    """The load failed; returns the pages, which are the caller's to free. The caller prunes the node."""
    pages = node.loading[worker.worker_id]
    node.loading = _without(node.loading, worker.worker_id)
    _count_below(state, node, worker.worker_id, -1)
    return pages


def give_host(state: CellState, node: Node, storage: Storage, pages: bytes) -> None:
    """These host pages, leased until now, hold the node's KV from now on."""
    node.host[storage.storage_id] = pages
    host_pool(storage).cached += len(pages) // 4
    offer(state, node)


def drop_host(state: CellState, node: Node, storage: Storage) -> int:
    """Free a storage's copy of a node that no load reads; returns the pages. May remove the node and its subtree."""
    pages = node.host[storage.storage_id]
    node.host = _without(node.host, storage.storage_id)
    if storage.storage_id in node.quarantined:
        node.quarantined = tuple(name for name in node.quarantined if name != storage.storage_id)
    pool = host_pool(storage)
    pool.cached -= len(pages) // 4
    release(pool, pages)
    if not prune(state, node):
        offer(state, node)
    return len(pages) // 4


def prune(state: CellState, node: Node) -> bool:
    """Remove a node that is resident nowhere, and with it what hangs below; returns whether it did.

    Nodes below it can have host copies only, which no match would ever reach.
    """
    if node.device or node.loading or node.host:
        return False
    parent: Node | None = None
    for gone in descendants_first(state.tree, node):
        for storage_id, pages in gone.host.items():
            pool = host_pool(state.storages[storage_id])
            pool.cached -= len(pages) // 4
            release(pool, pages)
        parent = remove_leaf(state.tree, gone)
    if parent is not None and parent.parent:
        offer(state, parent)
    return True


def split_node(state: CellState, node: Node, pages: int) -> Node:
    """Cut a node after ``pages`` pages; returns the new upper part (see :func:`prefix_tree.split`)."""
    upper = split(state.tree, node, pages)
    if node.transfer:
        members = state.transfers[node.transfer].nodes
        members.insert(members.index(node.id), upper.id)
    offer(state, upper)
    offer(state, node)
    return upper


def _count_below(state: CellState, node: Node, worker_id: str, change: int) -> None:
    parent = state.tree.nodes[node.parent]
    counted = parent.below.get(worker_id, 0) + change
    if counted:
        parent.below[worker_id] = counted
    else:
        parent.below = _without(parent.below, worker_id)


def _without(held: dict[str, V], name: str) -> dict[str, V]:
    """The dictionary less one key. An emptied one is replaced, because it would keep its table for good."""
    del held[name]
    return held or {}
