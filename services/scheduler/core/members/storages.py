"""Storages come and go; their host pools are made once a geometry and the cell's settings are known."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from services.scheduler.core.cache.page_pool import new_pool
from services.scheduler.core.hidden.hidden_saves import (
    attach_hidden_pool,
    drop_hidden_pool,
    hidden_pool_created,
    request_hidden_pools,
)
from services.scheduler.core.members.pool_loss import strike_host
from services.scheduler.core.restoring.fetches import abandon_fetches
from services.scheduler.core.state import CellState, Storage, Worker
from services.scheduler.core.tiers.backups import abandon_backups_of_storage
from services.scheduler.core.tiers.saves import abandon_saves_of_storage, save_what_devices_hold
from shared.messages.storage_plans import AttachDevicePool, CreateHostPool, DetachDevicePool
from shared.messages.worker_plans import AttachHostPool, DetachHostPool

if TYPE_CHECKING:
    from services.scheduler.core.step import Step
    from shared.messages.storage_events import HostPoolCreated, StorageJoined


def storage_joined(step: Step, message: StorageJoined) -> None:
    """Let a storage in. An older incarnation of it is lost by that."""
    state = step.state
    known = state.storages.get(message.storage_id)
    if known is not None and known.incarnation == message.incarnation:
        state.count("stale_inputs")
        return
    if known is not None:
        remove_storage(step, known)
    storage = Storage(
        message.storage_id,
        message.incarnation,
        message.node,
        message.host_bytes,
        disk_bytes=message.disk_bytes,
        has_remote=message.has_remote,
        disk_bytes_per_s=message.disk_bytes_per_s if 0.0 < message.disk_bytes_per_s < inf else 0.0,
        state_bytes=max(0, message.state_bytes),
        keeps_sparse=message.keeps_sparse,
    )
    state.storages[storage.storage_id] = storage
    state.count("storages_joined")
    for worker in _workers_of(state, storage):
        _request_pool(step, storage)
        _attach_device(step, storage, worker)
    request_hidden_pools(step)


def host_pool_created(step: Step, storage: Storage, message: HostPoolCreated) -> None:
    """A host pool is ready: its node's workers may load from it. So it goes with a state pool (:mod:`hidden_form`)."""
    state = step.state
    if message.form == "state":
        hidden_pool_created(step, storage, message)
        return
    handle = message.handle
    if handle is None or handle.pages < 1 or handle.geometry != state.geometry:
        state.count("host_pools_refused")
        return
    if storage.pool is not None:
        state.count("stale_inputs")
        return
    storage.handle, storage.pool = handle, new_pool(handle.pages)
    for worker in _workers_of(state, storage):
        step.to_worker(worker, AttachHostPool(storage_id=storage.storage_id, handle=handle))
    save_what_devices_hold(step, storage)


def attach_worker(step: Step, worker: Worker) -> None:
    """Tell a new worker and the storages of its node about one another."""
    for storage in step.state.storages.values():
        if storage.node != worker.node:
            continue
        _request_pool(step, storage)
        _attach_device(step, storage, worker)
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
        if any(True for _ in _workers_of(step.state, storage)):
            _request_pool(step, storage)
    request_hidden_pools(step)


def remove_storage(step: Step, storage: Storage) -> None:
    """A storage is gone with its host pool. Loads on their way from it are settled by their batches."""
    state = step.state
    state.count("storages_lost")
    abandon_backups_of_storage(step, storage)
    abandon_saves_of_storage(step, storage)
    abandon_fetches(step, storage, is_lost=True)
    has_pools = storage.handle is not None or storage.hidden_handle is not None
    drop_hidden_pool(step, storage)
    _forget_host_copies(state, storage)
    del state.storages[storage.storage_id]
    for worker in _workers_of(state, storage):
        if has_pools:
            step.to_worker(worker, DetachHostPool(storage_id=storage.storage_id))


def forget_host_pools(step: Step) -> None:
    """The cell's geometry changes while no worker is joined: every cached page goes, and new pools are due."""
    state = step.state
    for storage in state.storages.values():
        abandon_backups_of_storage(step, storage)
        abandon_saves_of_storage(step, storage)
        abandon_fetches(step, storage, is_lost=False)
        drop_hidden_pool(step, storage)
        _forget_host_copies(state, storage)
        storage.handle = storage.pool = None
        storage.is_pool_requested = False


def _forget_host_copies(state: CellState, storage: Storage) -> None:
    """Strike a storage's pool from the tree, and what is resident nowhere then."""
    for worker in state.workers.values():
        for batch in worker.batches:
            for load in batch.loads:
                if load.storage_id == storage.storage_id:
                    load.storage_id = ""
        if worker.promotion is not None and worker.promotion.storage_id == storage.storage_id:
            worker.promotion.storage_id = ""
    strike_host(state, storage.storage_id)


def _request_pool(step: Step, storage: Storage) -> None:
    """Ask for a host pool if there is none yet, once it is known whether one is wanted: a pool that was made stays."""
    state, geometry = step.state, step.state.geometry
    is_wanted = state.is_configured and state.config.host_tier
    if is_wanted and not storage.is_pool_requested and geometry is not None:
        storage.is_pool_requested = True
        step.to_storage(storage, CreateHostPool(geometry=geometry))


def _attach_device(step: Step, storage: Storage, worker: Worker) -> None:
    order = AttachDevicePool(worker_id=worker.worker_id, worker_incarnation=worker.incarnation, handle=worker.handle)
    step.to_storage(storage, order)


def _workers_of(state: CellState, storage: Storage) -> list[Worker]:
    """The workers on this storage's node."""
    return [worker for worker in state.workers.values() if worker.node == storage.node]
