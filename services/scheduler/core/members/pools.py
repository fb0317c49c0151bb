"""Pools of workers and storages: they are asked for, mapped by other processes, and struck from the tree when lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.page_pool import LostPool
from services.scheduler.core.cache.pins import forget_hold
from services.scheduler.core.cache.residency import (
    DEVICE,
    HOST,
    forget_order,
    give_up_copies,
    is_held,
    remove_struck,
    strike_entry,
)
from services.scheduler.core.hidden.hidden_saves import attach_hidden_pool, request_hidden_pools
from shared.messages.storage_plans import AttachDevicePool, CreateHostPool, DetachDevicePool
from shared.messages.worker_plans import AttachHostPool

if TYPE_CHECKING:
    from services.scheduler.core.cache.prefix_tree import Node
    from services.scheduler.core.state import CellState, Storage, Worker
    from services.scheduler.core.step import Step


STRIKE_UNITS = 1 << 16
"""Work of one step on lost pools: the number of nodes it visits, or 1/4 as many struck, or 1/16 removed (20-50 ms)."""

STRIKE_PAUSE_MS = 10
_UNITS_STRUCK, _UNITS_REMOVED, _CHILDREN_A_UNIT = 4, 16, 16


def strike(step: Step, tier: str, owner: str) -> None:
    """Strike a lost pool: its policy is forgotten at once, its nodes' entries a slice at a time.

    A device's nodes are found from the roots down, since each node there has its parent there: that costs in proportion
    to them and to their siblings. Nodes of a host pool may be anywhere, so all nodes are visited.
    """
    state = step.state
    forget_order(state, tier, owner)
    nodes = state.tree.nodes
    if tier == DEVICE:
        left = [root_id for root_id in state.tree.roots.values() if owner in nodes[root_id].below]
    else:
        forget_hold(state, owner)
        state.cache_leases.forget_storage(owner)
        left = list(nodes)
    state.lost[f"{tier}/{owner}"] = LostPool(left=left)
    if len(state.lost) == 1 and len(left) <= STRIKE_UNITS:  # Otherwise the timer's turn strikes it.
        go_on_striking(step)


def go_on_striking(step: Step) -> None:
    """Strike some nodes of lost pools; a timer goes on with the rest."""
    state = step.state
    gone: list[Node] = []
    units = STRIKE_UNITS
    while state.lost and units > 0:
        key, pool = next(iter(state.lost.items()))
        tier, _, owner = key.partition("/")
        while pool.left and units > 0:
            units -= 1 + _strike_next(state, tier, owner, pool.left, gone)
        if not pool.left:
            del state.lost[key]
    if state.recollection is not None:
        state.recollection.note_gone(gone, "lost", "", state.policy, state.now_ns)


def keep_striking(step: Step) -> None:
    """Set the timer that goes on striking lost pools, unless it is set."""
    if _TIMER not in step.state.timers:
        step.set_timer(_TIMER, "strike", "", STRIKE_PAUSE_MS)


_TIMER = "strike"


def _strike_next(state: CellState, tier: str, owner: str, left: list[int], gone: list[Node]) -> int:
    """Strike the next node, or queue those that have to go before it; return units of work.

    Children go before their parent, so that between any two calls what is on the lost device is closed upwards, and
    every node that is not held has a place in ``left``. Below a node that is not held are host copies at most, which no
    match reaches any more.
    """
    tree = state.tree
    node = tree.nodes.get(left.pop())
    if node is None:
        return 0
    if not node.parent:
        is_kept = True
    else:
        above = tree.nodes[node.parent]
        if above.parent and not is_held(state, above):
            give_up_copies(state, node)
        is_kept = is_held(state, node)
    if (tier == DEVICE and owner in node.below) or (not is_kept and node.children):
        left.append(node.id)
        left.extend(node.child_ids)
        return len(node.child_ids) // _CHILDREN_A_UNIT
    if not is_kept:
        gone.append(node)
        parent = remove_struck(state, node)
        if parent is not None and not parent.children and not is_held(state, parent):
            left.append(parent.id)
        return _UNITS_REMOVED
    is_named = tier == HOST and owner in node.host
    if is_named or (tier == DEVICE and (owner in node.device or owner in node.loading)):
        strike_entry(state, node, tier, owner)
        return _UNITS_STRUCK
    return 0


def attach_worker(step: Step, worker: Worker) -> None:
    """Tell a new worker and the storages of its node about one another."""
    for storage in step.state.storages.values():
        if storage.node != worker.node:
            continue
        request_pool(step, storage)
        attach_device(step, storage, worker)
        if storage.handle is not None:
            step.to_worker(worker, AttachHostPool(storage_id=storage.storage_id, handle=storage.handle))
        attach_hidden_pool(step, storage, worker)
    request_hidden_pools(step)


def detach_worker(step: Step, worker: Worker) -> None:
    """Tell the storages of its node that a worker's pool is gone."""
    for storage in step.state.storages.values():
        if storage.node == worker.node:
            step.to_storage(
                storage, DetachDevicePool(worker_id=worker.worker_id, worker_incarnation=worker.incarnation)
            )


def request_missing_pools(step: Step) -> None:
    """Ask for the pools that are wanted and not asked for yet, after new settings or a struck pool."""
    for storage in step.state.storages.values():
        if any(True for _ in workers_of(step.state, storage)):
            request_pool(step, storage)
    request_hidden_pools(step)


def request_pool(step: Step, storage: Storage) -> None:
    """Ask for a host pool if there is none yet and settings say that one is wanted: a pool, once made, stays.

    While nodes name an earlier pool of that storage, no other is asked for. Copies to be read in part come with the
    pool, or not at all where no worker of the node reads parts.
    """
    state, geometry = step.state, step.state.geometry
    is_wanted = state.is_configured and state.config.host_tier and f"{HOST}/{storage.storage_id}" not in state.lost
    if is_wanted and not storage.is_pool_requested and geometry is not None:
        storage.is_pool_requested = True
        sparse, workers = storage.sparse, workers_of(state, storage)
        if sparse.is_kept or sparse.is_left_out:
            sparse.is_left_out = bool(workers) and all(worker.reads_no_parts for worker in workers)
            sparse.is_kept = not sparse.is_left_out
        step.to_storage(storage, CreateHostPool(geometry=geometry, is_read_in_part=not sparse.is_left_out))


def attach_device(step: Step, storage: Storage, worker: Worker) -> None:
    """Have a storage map a worker's device pool, which it will read for backups and saves."""
    order = AttachDevicePool(worker_id=worker.worker_id, worker_incarnation=worker.incarnation, handle=worker.handle)
    step.to_storage(storage, order)


def workers_of(state: CellState, storage: Storage) -> list[Worker]:
    """Return the workers on this storage's node."""
    return [worker for worker in state.workers.values() if worker.node == storage.node]


def forget_host_copies(step: Step, storage: Storage) -> None:
    """Strike a storage's pool from the tree, if it has one, and nodes that are then in no pool."""
    state = step.state
    if storage.pool is None:
        return
    for worker in state.workers.values():
        for batch in worker.work.batches:
            for load in batch.loads:
                if load.storage_id == storage.storage_id:
                    load.storage_id = ""
        if worker.moves.promotion is not None and worker.moves.promotion.storage_id == storage.storage_id:
            worker.moves.promotion.storage_id = ""
    strike(step, HOST, storage.storage_id)
