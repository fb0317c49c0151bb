"""Pools come and go with workers and storages: they are asked for, mapped by others, and struck from the tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.empty_map import without_entry
from services.scheduler.core.cache.pins import forget_hold
from services.scheduler.core.cache.residency import DEVICE, HOST, forget_order, remove_all
from services.scheduler.core.hidden.hidden_saves import attach_hidden_pool, request_hidden_pools
from shared.messages.storage_plans import AttachDevicePool, CreateHostPool, DetachDevicePool
from shared.messages.worker_plans import AttachHostPool

if TYPE_CHECKING:
    from services.scheduler.core.state import CellState, Storage, Worker
    from services.scheduler.core.step import Step


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
    """Ask for the pools that are not asked for yet, now that settings were said, or that they want pools at last."""
    for storage in step.state.storages.values():
        if any(True for _ in workers_of(step.state, storage)):
            request_pool(step, storage)
    request_hidden_pools(step)


def request_pool(step: Step, storage: Storage) -> None:
    """Ask for a host pool if there is none yet, once it is known whether one is wanted: a pool that was made stays."""
    state, geometry = step.state, step.state.geometry
    is_wanted = state.is_configured and state.config.host_tier
    if is_wanted and not storage.is_pool_requested and geometry is not None:
        storage.is_pool_requested = True
        step.to_storage(storage, CreateHostPool(geometry=geometry))


def attach_device(step: Step, storage: Storage, worker: Worker) -> None:
    order = AttachDevicePool(worker_id=worker.worker_id, worker_incarnation=worker.incarnation, handle=worker.handle)
    step.to_storage(storage, order)


def workers_of(state: CellState, storage: Storage) -> list[Worker]:
    """The workers on this storage's node."""
    return [worker for worker in state.workers.values() if worker.node == storage.node]


def forget_host_copies(state: CellState, storage: Storage) -> None:
    """Strike a storage's pool from the tree, and what is resident nowhere then."""
    for worker in state.workers.values():
        for batch in worker.work.batches:
            for load in batch.loads:
                if load.storage_id == storage.storage_id:
                    load.storage_id = ""
        if worker.moves.promotion is not None and worker.moves.promotion.storage_id == storage.storage_id:
            worker.moves.promotion.storage_id = ""
    strike_host(state, storage.storage_id)
