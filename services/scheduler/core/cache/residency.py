"""Residency of nodes: pages per pool, locks per worker, and what may therefore be evicted.

All changes of ``device``, ``loading``, ``host``, ``locks`` and ``host_locks`` happen here (of a whole pool that is
gone, in :mod:`pools`), so that the pools' counts, the parents' ``below`` and the eviction policies always agree
with them.

Rules that hold between steps:

* what is on a worker's device is closed upwards: so is the parent, and what is loading has a parent that is
  on the device or loading;
* every node but a root is resident somewhere: on a device, loading, or in a host pool;
* a node goes from a device only when it is unlocked, no child is on that device, and no backup reads it;
* a host copy goes only when no load reads it, and the node is also on a device or has no children; where nodes share
  host memory, when no child is in the same pool and the node is elsewhere too, or has no children.

A pool that is lost stays in ``device``, ``loading`` and ``host`` of its nodes until they are struck (``state.lost``,
see :mod:`pools`). It is not looked up by its name meanwhile; code that goes through all names asks :func:`devices_of`
and :func:`copies_of`. A node that nothing else holds is removed when it is struck, and not before.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from services.scheduler.core.cache.candidates import (
    coldest_of_device,
    coldest_of_host,
    hottest_below,
    note_children,
    note_node,
)
from services.scheduler.core.cache.eviction import Moment, Policy, make_policy
from services.scheduler.core.cache.holdings import EMPTY_MAP, counted, counted_once, with_count, without_count
from services.scheduler.core.cache.hotness.tracking import node_split
from services.scheduler.core.cache.kept import pinned_pages
from services.scheduler.core.cache.page_pool import LostPool
from services.scheduler.core.cache.prefix_tree import (
    Node,
    page_count,
    remove_leaf,
    remove_subtree,
    split,
    way_to,
)
from services.scheduler.core.cache.unsaved import move_up
from shared.chunks import chunk_tokens
from shared.errors import InvariantViolated

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from services.scheduler.core.cache.eviction.policy import Renewal
    from services.scheduler.core.cache.kept import LeasedNode
    from services.scheduler.core.cache.page_pool import PagePool
    from services.scheduler.core.cache.prefix_tree import PrefixTree
    from services.scheduler.core.state import CellState, Storage, Worker
    from shared.messages.explanations import Departure

_LOCKS, _TRANSFERS, _DEVICES, _HOSTS = map(attrgetter, ("locks", "transfer", "device", "host"))

DEVICE = "device"
HOST = "host"
UNREACHED = "unreached"  # In place of a tier: below a node that is not held any more.


def host_pool(storage: Storage) -> PagePool:
    """Return the host pool of a storage. Raises InvariantViolated where it has none."""
    if storage.pool is None:
        raise InvariantViolated(f"storage {storage.storage_id} has no host pool")
    return storage.pool


def is_device_evictable(state: CellState, node: Node, worker_id: str) -> bool:
    """Return whether this worker's pages of the node may be freed."""
    if worker_id not in node.device or node.locks.get(worker_id) or node.below.get(worker_id):
        return False
    return not node.transfer or state.transfers[node.transfer].worker_id != worker_id


def is_left_bare(node: Node, worker_id: str, leaving: Mapping[int, int]) -> bool:
    """Return whether only children that are about to leave keep this node on the device, and no backup reads it."""
    if worker_id not in node.device or node.locks.get(worker_id) or node.transfer:
        return False
    return 0 < node.below.get(worker_id, 0) == leaving.get(node.id)


def is_host_evictable(state: CellState, node: Node, storage_id: str) -> bool:
    """Return whether this storage's copy of the node may be freed."""
    if storage_id not in node.host or node.host_locks.get(storage_id):
        return False
    if not node.children or node.rare.is_sealed or not state.storages[storage_id].shares:
        return bool(node.device) or not node.children
    return _stays_resident(state, node, storage_id) and not _goes_on(state, node, storage_id)


CHILDREN_ASKED = 16
"""Children that are searched at most; a node with more keeps its copies, as it is a prefix of many."""


def _goes_on(state: CellState, node: Node, storage_id: str) -> bool:
    """Return whether a pool has or may have a copy below a node that is worth keeping the node's copy.

    A copy shorter than a chunk, such as a question below its document, is never lent and does not count.
    """
    nodes, least = state.tree.nodes, chunk_tokens(state.tree.page_size)
    left, asked = list(node.child_ids), 0
    while left:
        child = nodes[left.pop()]
        asked += 1
        if asked + len(left) > CHILDREN_ASKED:
            return True
        if storage_id in child.host:
            if child.size >= least or child.host_locks.get(storage_id):
                return True
            left += child.child_ids
    return False


def _offer_above(state: CellState, node: Node) -> None:
    """Offer copies above one that is gone: it may have been the only reason to keep them."""
    least = chunk_tokens(state.tree.page_size)
    while node.parent:
        offer(state, node)
        if node.size >= least:
            return
        node = state.tree.nodes[node.parent]


def _stays_resident(state: CellState, node: Node, storage_id: str) -> bool:
    """Return whether a node is resident without a storage's copy, so that nodes below it can still be reached."""
    if node.device:
        return True
    return any(name != storage_id and name not in node.quarantined for name in copies_of(state, node))


def devices_of(state: CellState, node: Node) -> Sequence[str]:
    """Return the living workers that have the node on their device. Changes nothing."""
    if not state.lost:
        return node.device
    return [name for name in node.device if name in state.workers]


def copies_of(state: CellState, node: Node) -> Sequence[str]:
    """Return the living storages that have the node in their host pool. Changes nothing."""
    if not state.lost:
        return node.host
    return [name for name in node.host if f"{HOST}/{name}" not in state.lost]


def is_held(state: CellState, node: Node) -> bool:
    """Return whether the node is resident, or about to be, in a pool that still exists. Changes nothing."""
    if not state.lost:
        return bool(node.device or node.host or node.loading)
    for name in node.device:
        if name in state.workers:
            return True
    for name in node.host:
        if f"{HOST}/{name}" not in state.lost:
            return True
    return any(name in state.workers for name in node.loading)


def moment(state: CellState, admission: int = 0) -> Moment:
    """Return what policies may know of the present; ``admission`` is the request that causes the event, 0 for none."""
    return Moment(state.last_seq, state.now_ns, state.admissions, state.hotness, admission=admission)


def order_of(state: CellState, tier: str, owner: str) -> Policy:
    """Return the eviction policy of a pool, made at its first use."""
    key = f"{tier}/{owner}"
    order = state.orders.get(key)
    return order if order is not None else _make_order(state, state.orders, tier, owner)


def coming_order_of(state: CellState, renewal: Renewal, tier: str, owner: str) -> Policy:
    """Return the policy that takes effect in a pool when a renewal is done, made at its first use."""
    order = renewal.orders.get(f"{tier}/{owner}")
    return order if order is not None else _make_order(state, renewal.orders, tier, owner)


def _make_order(state: CellState, orders: dict[str, Policy], tier: str, owner: str) -> Policy:
    pool = state.workers[owner].pool if tier == DEVICE else host_pool(state.storages[owner])
    capacity = pool.total * state.tree.page_size
    order = make_policy(state.policy, capacity, state.config, orders_of_tier(orders, tier))
    orders[f"{tier}/{owner}"] = order
    return order


def _orders_told(state: CellState, node: Node, tier: str, owner: str) -> Sequence[Policy]:
    """Return the policies to tell of a node in a pool: the present one, and the coming one if it knows the node."""
    renewal = state.renewal
    if renewal is None or node.id not in renewal.told:
        return (order_of(state, tier, owner),)
    return (order_of(state, tier, owner), coming_order_of(state, renewal, tier, owner))


def tell(state: CellState, renewal: Renewal, node: Node) -> None:
    """Tell the coming policies of a node, and before it of the nodes above, unless they know it."""
    untold = []
    while node.parent and node.id not in renewal.told:
        untold.append(node)
        node = state.tree.nodes[node.parent]
    now = moment(state)
    for each in reversed(untold):
        renewal.told[each.id] = None
        for worker_id in devices_of(state, each):
            coming_order_of(state, renewal, DEVICE, worker_id).add(each, now)
        for storage_id in copies_of(state, each):
            coming_order_of(state, renewal, HOST, storage_id).add(each, now)
        offer(state, each)


def orders_of_tier(orders: Mapping[str, Policy], tier: str) -> list[Policy]:
    """Return the eviction policies of a tier's pools, the oldest first."""
    return [order for key, order in orders.items() if key.startswith(f"{tier}/")]


def forget_order(state: CellState, tier: str, owner: str) -> None:
    """Forget the policy, the indexes and the owners' accounts of a pool that is gone."""
    for orders in (state.orders, state.renewal.orders if state.renewal is not None else {}):
        gone = orders.pop(f"{tier}/{owner}", None)
        if gone is not None:
            gone.leave(orders_of_tier(orders, tier))
            state.retired.append(gone)
    if state.quotas.accounts:
        state.quotas.forget_pool(f"{tier}/{owner}")
    for key in (coldest_of_device(owner), hottest_below(owner)) if tier == DEVICE else (coldest_of_host(owner),):
        state.candidates.pop(key, None)


def offer(state: CellState, node: Node) -> None:
    """Tell the policy of every pool from which the node may be evicted, and the indexes."""
    locks, below = node.locks, node.below
    for worker_id in devices_of(state, node):
        # A prefix that many share is kept nearly everywhere by its continuations: most loops end here.
        if not below.get(worker_id) and not locks.get(worker_id) and is_device_evictable(state, node, worker_id):
            _offer_to(state, node, DEVICE, worker_id)
    for storage_id in copies_of(state, node):
        if is_host_evictable(state, node, storage_id):
            _offer_to(state, node, HOST, storage_id)
    if state.candidates:
        note_node(state, node)


def offer_left_bare(state: CellState, node: Node, worker_id: str) -> None:
    """Offer a node that may leave this device together with its children (see :func:`is_left_bare`)."""
    _offer_to(state, node, DEVICE, worker_id)


def _offer_to(state: CellState, node: Node, tier: str, pool_owner: str) -> None:
    for order in _orders_told(state, node, tier, pool_owner):
        order.offer(node)
    if node.owner:
        state.quotas.offer(node, f"{tier}/{pool_owner}")


def touch(state: CellState, node: Node, seq: int) -> None:
    """Mark a node as used by input ``seq``, and offer it again."""
    node.last_use = seq
    offer(state, node)


def touch_locked(state: CellState, nodes: Sequence[Node], worker: Worker, seq: int) -> None:
    """Touch nodes of a path that all have locks of this worker. A node that only this device holds is not offered."""
    name = worker.worker_id
    is_plain = not state.candidates
    if nodes and is_plain and _are_held_by(nodes, name):
        for node in nodes:
            node.last_use = seq
        return
    for node in nodes:
        node.last_use = seq
        if not is_plain or node.host or len(node.device) != 1 or node.device[0] != name:
            offer(state, node)


def lock_path(state: CellState, node: Node, worker: Worker, *, below: Node | None = None) -> None:
    """Keep ``node`` and everything above it on this worker's device.

    A node ``below`` is on the way to this one and has its path locked already; its locks then stand for the whole.
    """
    name, nodes = worker.worker_id, way_to(state.tree, node).nodes
    if below is not None:
        nodes = nodes[len(way_to(state.tree, below).nodes) :]
    if _lock_together(state, nodes, worker):
        return
    once, locked = counted_once(name), 0
    for each in reversed(nodes):
        count = each.locks.get(name, 0)
        each.locks = with_count(each.locks, name, count + 1) if each.locks else once
        if not count and name in each.device:
            pages = page_count(state.tree, each)
            locked += pages
            if each.transfer and leaves_with_backup(state, each, name):
                count_leaving(state, each, worker, -pages)
    worker.pool.locked += locked


def unlock_path(state: CellState, node: Node, worker: Worker) -> None:
    """Undo :func:`lock_path`. Nodes without further locks may be evicted again."""
    nodes = way_to(state.tree, node).nodes
    if not _unlock_together(state, nodes, worker):
        for each in reversed(nodes):
            _unlock(state, each, worker)


def _lock_together(state: CellState, nodes: Sequence[Node], worker: Worker) -> bool:
    """Lock the nodes of a path at once, if only this worker locks them and all alike; return whether it did."""
    count = _locked_alike(nodes, worker.worker_id)
    if count < 0:
        return False
    if not count:
        if worker.worker_id not in nodes[-1].device or any(map(_TRANSFERS, nodes)):
            return False
        worker.pool.locked += (nodes[-1].end - nodes[0].depth) // state.tree.page_size
    locks = counted(worker.worker_id, count + 1)
    for node in nodes:
        node.locks = locks
    return True


def _unlock_together(state: CellState, nodes: Sequence[Node], worker: Worker) -> bool:
    """Undo :func:`_lock_together` for a whole path, if only this worker's device holds it; return whether it did.

    Each node is kept by its child, so that only the last one is offered.
    """
    count, locks = _locked_alike(nodes, worker.worker_id), EMPTY_MAP
    if count < 1:
        return False
    if count > 1:
        locks = counted(worker.worker_id, count - 1)
    elif state.candidates or any(map(_TRANSFERS, nodes)) or not _are_held_by(nodes, worker.worker_id):
        return False
    for node in nodes:
        node.locks = locks
    if not locks:
        worker.pool.locked -= (nodes[-1].end - nodes[0].depth) // state.tree.page_size
        offer(state, nodes[-1])
    return True


def _locked_alike(nodes: Sequence[Node], worker_id: str) -> int:
    """Return the number of this worker's locks on each of the nodes; -1 if it differs or others lock them."""
    if not nodes:
        return -1
    locks = nodes[-1].locks
    if len(locks) > 1 or list(map(_LOCKS, nodes)).count(locks) < len(nodes):
        return -1
    return locks.get(worker_id, -1) if locks else 0


def _are_held_by(nodes: Sequence[Node], worker_id: str) -> bool:
    """Return whether this worker's device, and no other pool, holds each of these nodes."""
    held = nodes[0].device
    if len(held) != 1 or held[0] != worker_id or any(map(_HOSTS, nodes)):
        return False
    return list(map(_DEVICES, nodes)).count(held) == len(nodes)


def _unlock(state: CellState, node: Node, worker: Worker) -> None:
    locks = node.locks.get(worker.worker_id, 0)
    if locks < 1:
        raise InvariantViolated(f"node {node.id} was unlocked once too often for {worker.worker_id}")
    if locks > 1:
        node.locks = with_count(node.locks, worker.worker_id, locks - 1)
        return
    node.locks = without_count(node.locks, worker.worker_id)
    if worker.worker_id in node.device:
        pages = page_count(state.tree, node)
        worker.pool.locked -= pages
        if leaves_with_backup(state, node, worker.worker_id):
            count_leaving(state, node, worker, pages)
        offer(state, node)


def count_leaving(state: CellState, node: Node, worker: Worker, pages: int) -> None:
    """Count pages of a node on this worker that a running backup will free; negative where it will not any more."""
    worker.moves.leaving += pages
    if node.owner:
        state.quotas.note_leaving(node.owner, f"{DEVICE}/{worker.worker_id}", pages)


def leaves_with_backup(state: CellState, node: Node, worker_id: str) -> bool:
    """Return whether a backup that is not late will free this device's pages of the node."""
    if not node.transfer:
        return False
    transfer = state.transfers[node.transfer]
    return transfer.worker_id == worker_id and not transfer.is_late and not transfer.stays


def lock_host(node: Node, storage_id: str) -> None:
    """Keep a host copy while a load reads it, or a pin or lease wants it."""
    locks = node.host_locks
    node.set_rare(host_locks=with_count(locks, storage_id, locks.get(storage_id, 0) + 1))


def unlock_host(state: CellState, node: Node, storage: Storage) -> None:
    """Undo :func:`lock_host`; a quarantined copy goes with its last reader. May remove the node."""
    locks = node.host_locks[storage.storage_id] - 1
    if locks:
        node.set_rare(host_locks=with_count(node.host_locks, storage.storage_id, locks))
        return
    node.set_rare(host_locks=without_count(node.host_locks, storage.storage_id))
    if storage.storage_id in node.quarantined:
        drop_host(state, node, storage, "failed")
    else:
        offer(state, node)


def quarantine(state: CellState, node: Node, storage: Storage) -> None:
    """Never match this host copy again; free it as soon as no load reads it. May remove the node."""
    if state.cache_leases.nodes:
        _let_go_of_leased_copy(state, node, storage)
    if node.host_locks.get(storage.storage_id):
        if storage.storage_id not in node.quarantined:
            node.set_rare(quarantined=(*node.quarantined, storage.storage_id))
    else:
        drop_host(state, node, storage, "failed")


def give_device(state: CellState, node: Node, worker: Worker, pages: bytes, admission: int = 0) -> None:
    """Make leased pages of a worker (packed int32) the node's.

    ``admission`` is that of the request that computed it.
    """
    if state.renewal is not None:
        tell(state, state.renewal, node)
    node.put_on_device(worker.worker_id, pages)
    worker.pool.cached += len(pages) // 4
    if node.owner:
        state.quotas.charge(node.owner, f"{DEVICE}/{worker.worker_id}", len(pages) // 4)
    if node.locks.get(worker.worker_id):
        worker.pool.locked += len(pages) // 4
    _count_below(state, node, worker.worker_id, 1)
    now = moment(state, admission)
    for order in _orders_told(state, node, DEVICE, worker.worker_id):
        order.add(node, now)
    offer(state, node)
    if state.candidates and node.children:
        note_children(state, node, worker.worker_id)


def drop_device(state: CellState, node: Node, worker: Worker, departure: Departure = "evicted") -> int:
    """Free this worker's pages of an evictable node; return how many. May remove the node.

    ``departure`` is remembered as the reason if these were its last pages.
    """
    pages = node.take_from_device(worker.worker_id)
    worker.pool.cached -= len(pages) // 4
    worker.pool.release(pages)
    _forget(state, node, DEVICE, worker.worker_id)
    if node.owner:
        state.quotas.withdraw(node, f"{DEVICE}/{worker.worker_id}", moment(state))
        state.quotas.charge(node.owner, f"{DEVICE}/{worker.worker_id}", -(len(pages) // 4))
    parent = state.tree.nodes[node.parent]
    _count_below(state, node, worker.worker_id, -1)
    if not prune(state, node, departure, DEVICE):
        offer(state, node)
        if parent.parent:
            offer(state, parent)
    return len(pages) // 4


def begin_loading(state: CellState, node: Node, worker: Worker, pages: bytes) -> None:
    """Reserve these leased pages for the node's KV until the load is done."""
    node.put_loading(worker.worker_id, pages)
    _count_below(state, node, worker.worker_id, 1)
    if node.owner:
        state.quotas.charge(node.owner, f"{DEVICE}/{worker.worker_id}", len(pages) // 4)


def finish_loading(state: CellState, node: Node, worker: Worker) -> None:
    """End a load that succeeded: the node is on the device now."""
    give_device(state, node, worker, _end_loading(state, node, worker))


def cancel_loading(state: CellState, node: Node, worker: Worker) -> bytes:
    """End a load that failed; return its pages, which the caller frees. The caller also prunes the node."""
    pages = _end_loading(state, node, worker)
    parent = state.tree.nodes[node.parent]
    if parent.parent:
        offer(state, parent)  # The load may have been all that kept it, and nothing else offers it.
    return pages


def _end_loading(state: CellState, node: Node, worker: Worker) -> bytes:
    pages = node.take_loading(worker.worker_id)
    _count_below(state, node, worker.worker_id, -1)
    if node.owner:
        state.quotas.charge(node.owner, f"{DEVICE}/{worker.worker_id}", -(len(pages) // 4))
    return pages


def give_host(state: CellState, node: Node, storage: Storage, pages: bytes, source: str = "") -> None:
    """Make leased host pages (packed int32) the node's copy. Its owner was charged when they were leased.

    ``source`` is the worker that it was copied from, whose policy knows the admission that computed it.
    """
    computed = state.orders.get(f"{DEVICE}/{source}")
    now = moment(state, computed.admission_of(node) if computed is not None else 0)
    if state.renewal is not None:
        tell(state, state.renewal, node)
    node.put_in_host(storage.storage_id, pages)
    host_pool(storage).cached += len(pages) // 4
    if state.cache_leases.nodes:
        hold_leased_copy(state, node)
    for order in _orders_told(state, node, HOST, storage.storage_id):
        order.add(node, now)
    offer(state, node)


def forget_return(state: CellState, node_id: int) -> None:
    """Expect no session behind a node any more, and offer it like any other."""
    del state.returns[node_id]
    offer(state, state.tree.nodes[node_id])


def forget_late_returns(state: CellState) -> None:
    """Forget sessions that are not back in time."""
    if state.now_ns < state.returns_due_ns:
        return
    for node_id in [node_id for node_id, expected in state.returns.items() if expected.until_ns <= state.now_ns]:
        state.count("returns_late")
        forget_return(state, node_id)
    state.returns_due_ns = min((expected.until_ns for expected in state.returns.values()), default=0)


def let_go_of_held(state: CellState, storage: Storage, request_id: str) -> bool:
    """Hold no copy for a request any more, and offer it again; return whether one was held."""
    before = storage.fetching.held.pop(request_id, 0)
    offer_unless_held(state, storage, before)
    return before > 0


def offer_unless_held(state: CellState, storage: Storage, node_id: int) -> None:
    """Offer a node, if it exists, that no waiting request holds any more."""
    node = state.tree.nodes.get(node_id)
    if node is not None and node_id not in storage.fetching.held.values():
        offer(state, node)


def hold_leased_copy(state: CellState, node: Node) -> None:
    """Lock the host copies of a leased node, each as far as its pool's share for leases and pins goes."""
    leases = state.cache_leases
    entry = leases.nodes.get(node.id)
    if entry is None:
        return
    pages = page_count(state.tree, node)
    for storage_id in copies_of(state, node):
        if storage_id in entry.storages or storage_id in node.quarantined:
            continue
        most = int(host_pool(state.storages[storage_id]).total * state.config.pin_fraction)
        locked = leases.locked.get(storage_id, 0) + pages
        if locked + pinned_pages(state, storage_id) <= most:
            lock_host(node, storage_id)
            entry.storages += (storage_id,)
            leases.locked[storage_id] = locked


def let_go_of_leased_copies(state: CellState, node: Node, entry: LeasedNode) -> None:
    """Unlock the host copies of a node whose leases are over."""
    for storage_id in entry.storages:
        state.cache_leases.locked[storage_id] -= page_count(state.tree, node)
        unlock_host(state, node, state.storages[storage_id])
    entry.storages = ()


def _let_go_of_leased_copy(state: CellState, node: Node, storage: Storage) -> None:
    """Unlock a leased host copy that failed verification."""
    entry = state.cache_leases.nodes.get(node.id)
    if entry is not None and storage.storage_id in entry.storages:
        entry.storages = tuple(name for name in entry.storages if name != storage.storage_id)
        state.cache_leases.locked[storage.storage_id] -= page_count(state.tree, node)
        unlock_host(state, node, storage)


def _lose_leased(state: CellState, gone: Sequence[Node], parent: Node | None) -> None:
    """End leases at ``parent`` that covered nodes removed below it, and expect no session behind these nodes."""
    for node in gone if state.returns else ():
        state.returns.pop(node.id, None)
    if state.cache_leases.nodes:
        lost = state.cache_leases.lose([(node, page_count(state.tree, node)) for node in gone], parent)
        state.count("cache_leased_pages_lost", lost)


def drop_host(state: CellState, node: Node, storage: Storage, departure: Departure = "evicted") -> int:
    """Free a storage's copy of a node that no load reads; return how many pages.

    May remove the node and its subtree. ``departure`` is remembered as the reason if it was the last copy.
    """
    pages = node.take_from_host(storage.storage_id)
    if storage.storage_id in node.quarantined:
        node.set_rare(quarantined=tuple(name for name in node.quarantined if name != storage.storage_id))
    pool = host_pool(storage)
    pool.cached -= len(pages) // 4
    pool.release(pages)
    _forget(state, node, HOST, storage.storage_id)
    if node.owner:
        _leave_host(state, node, storage.storage_id, pages)
    parent = state.tree.nodes[node.parent]
    if not prune(state, node, departure, HOST):
        offer(state, node)
    if storage.shares and parent.id in state.tree.nodes:
        _offer_above(state, parent)
    return len(pages) // 4


def prune(state: CellState, node: Node, departure: Departure = "lost", tier: str = "") -> bool:
    """Remove a node that is resident nowhere, with all nodes below it; return whether it was.

    Nodes below it can have host copies only, which no match would ever reach. More than MOST_PRUNED are left to be
    struck later.
    """
    if node.device or node.loading or node.host:
        return False
    if node.children and _has_more_below(state.tree, node, MOST_PRUNED):
        state.lost[f"{UNREACHED}/{node.id}"] = LostPool(left=[node.id])
    else:
        _remove_all(state, node, departure, tier)
    return True


MOST_PRUNED = 1024
"""Nodes at most that are removed at once with the one above them."""


def _has_more_below(tree: PrefixTree, top: Node, most: int) -> bool:
    """Return whether more than ``most`` nodes are below ``top``."""
    seen, stack = 0, [top]
    while stack:
        children = stack.pop().child_ids
        seen += len(children)
        if seen > most:
            return True
        stack += map(tree.nodes.__getitem__, children)
    return False


def _remove_all(state: CellState, top: Node, departure: Departure, tier: str) -> None:
    """Remove a node with all below it; how they left, and from which tier last, is remembered."""
    returned: dict[str, list[bytes]] = {}
    gone, parent = remove_subtree(state.tree, top)
    move_up(state, gone, parent)
    _lose_leased(state, gone, parent)
    for node in gone:
        for storage_id in copies_of(state, node):
            pages = node.host_pages(storage_id)
            returned.setdefault(storage_id, []).append(pages)
            _forget(state, node, HOST, storage_id)
            if node.owner:
                _leave_host(state, node, storage_id, pages)
    if state.recollection is not None:
        state.recollection.note_gone(gone, departure, tier, state.policy, state.now_ns)
    for storage_id, lists in returned.items():
        pool = host_pool(state.storages[storage_id])
        pages = b"".join(lists)
        pool.cached -= len(pages) // 4
        pool.release(pages)
    if parent is not None and parent.parent:
        offer(state, parent)


def _forget(state: CellState, node: Node, tier: str, owner: str) -> None:
    """Tell the policies of a pool that a node has left it."""
    now = moment(state)
    for order in _orders_told(state, node, tier, owner):
        order.remove(node, now)


def _leave_host(state: CellState, node: Node, storage_id: str, pages: bytes) -> None:
    """Subtract these pages of a host pool from the account of the node's owner."""
    state.quotas.withdraw(node, f"{HOST}/{storage_id}", moment(state))
    state.quotas.charge(node.owner, f"{HOST}/{storage_id}", -(len(pages) // 4))


def split_node(state: CellState, node: Node, pages: int) -> Node:
    """Cut a node after ``pages`` pages; return the new upper part (see :func:`prefix_tree.split`)."""
    upper = split(state.tree, node, pages)
    node_split(state, upper, node)
    if state.cache_leases.nodes:
        state.cache_leases.split(upper, node)
    if node.transfer:
        members = state.transfers[node.transfer].nodes
        members.insert(members.index(node.id) + 1, upper.id)
    for worker_id in devices_of(state, node):
        for order in _orders_told(state, node, DEVICE, worker_id):
            order.split(upper, node)
    for storage_id in copies_of(state, node):
        for order in _orders_told(state, node, HOST, storage_id):
            order.split(upper, node)
    if state.renewal is not None and node.id in state.renewal.told:
        state.renewal.told[upper.id] = None
    for pool in state.lost.values():  # The lost pool may be named in the upper part, too.
        pool.left.append(upper.id)
    offer(state, upper)
    offer(state, node)
    return upper


def give_up_copies(state: CellState, node: Node) -> None:
    """Free the host copies of a node that no match can reach any more and no load reads."""
    leased = state.cache_leases.nodes.get(node.id)
    if leased is not None:
        let_go_of_leased_copies(state, node, leased)
    for storage_id in copies_of(state, node):
        pages = node.take_from_host(storage_id)
        pool = host_pool(state.storages[storage_id])
        pool.cached -= len(pages) // 4
        pool.release(pages)
        _forget(state, node, HOST, storage_id)
        if node.owner:
            _leave_host(state, node, storage_id, pages)
        node.set_rare(quarantined=tuple(name for name in node.quarantined if name != storage_id))


def remove_struck(state: CellState, node: Node) -> Node | None:
    """Remove a node without children that is not held (:func:`is_held`); return its parent, or None for a root."""
    for worker_id in (*node.device, *node.loading):
        _count_below(state, node, worker_id, -1)
    parent = remove_leaf(state.tree, node)
    move_up(state, [node], parent)
    _lose_leased(state, [node], parent)
    if parent is None or not parent.parent:
        return None
    if not parent.children:
        offer(state, parent)
    elif any(storage.shares for storage in state.storages.values()):
        _offer_above(state, parent)
    return parent


def strike_entry(state: CellState, node: Node, tier: str, owner: str) -> None:
    """Remove a lost pool's pages and locks from a node none of whose children names the pool any more."""
    if tier == HOST:
        node.take_from_host(owner)
        if owner in node.host_locks:
            node.set_rare(host_locks=without_count(node.host_locks, owner))
        if owner in node.quarantined:
            node.set_rare(quarantined=tuple(name for name in node.quarantined if name != owner))
        return
    if owner in node.device:
        node.take_from_device(owner)
        _count_below(state, node, owner, -1)
    if owner in node.loading:
        node.take_loading(owner)
        _count_below(state, node, owner, -1)
    if owner in node.locks:
        node.locks = without_count(node.locks, owner)


def _count_below(state: CellState, node: Node, worker_id: str, change: int) -> None:
    parent = state.tree.nodes[node.parent]
    counted = parent.below.get(worker_id, 0) + change
    if counted:
        parent.below = with_count(parent.below, worker_id, counted)
    else:
        parent.below = without_count(parent.below, worker_id)
