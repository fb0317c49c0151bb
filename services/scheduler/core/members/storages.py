"""Storages that join and leave; their host pools are made once a geometry and the cell's settings are known."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from services.scheduler.core.cache.hotness.tracking import fit_pools
from services.scheduler.core.cache.page_pool import MOST_PAGES, new_pool
from services.scheduler.core.cache.residency import HOST
from services.scheduler.core.hidden.hidden_in_flight import HiddenTier
from services.scheduler.core.hidden.hidden_saves import (
    drop_hidden_pool,
    hidden_pool_created,
    request_hidden_pools,
)
from services.scheduler.core.members.handover import forget_node_drain
from services.scheduler.core.members.pools import (
    attach_device,
    forget_host_copies,
    request_pool,
    workers_of,
)
from services.scheduler.core.restoring.fetches import abandon_fetches
from services.scheduler.core.sparse.sparse_records import SparseTier
from services.scheduler.core.state import Storage
from services.scheduler.core.tiers.backups import abandon_backups_of_storage
from services.scheduler.core.tiers.lending import forget_lender
from services.scheduler.core.tiers.saves import abandon_saves_of_storage, save_what_devices_hold
from services.scheduler.core.tiers.under_way import DiskTier, Fetching
from shared.chunks import GEOMETRY_BYTES
from shared.hidden_forms import MOST_SHAPES
from shared.messages.pools import HIDDEN
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
    is_listing = len(message.shapes) % GEOMETRY_BYTES == 0 and len(message.shapes) <= MOST_SHAPES * GEOMETRY_BYTES
    if min(message.disk_bytes, message.hidden_bytes) < 0 or not is_listing:
        state.count("malformed_inputs")
    storage = Storage(
        message.storage_id,
        message.incarnation,
        message.node,
        message.host_bytes,
        disk=DiskTier(budget_bytes=max(0, message.disk_bytes), has_remote=message.has_remote),
        fetching=Fetching(
            disk_bytes_per_s=_speed(message.disk_bytes_per_s),
            measured_bytes_per_s=_speed(message.disk_measured_bytes_per_s),
        ),
        hidden=HiddenTier(pool_bytes=max(0, message.hidden_bytes), shapes=message.shapes if is_listing else b""),
        sparse=SparseTier(is_kept=message.keeps_sparse),
        shares=message.shares,
        handover_bytes=max(0, message.handover_bytes),
        takes_compact=message.takes_compact,
    )
    state.storages[storage.storage_id] = storage
    state.count("storages_joined")
    for worker in workers_of(state, storage):
        request_pool(step, storage)
        attach_device(step, storage, worker)
    request_hidden_pools(step)


def _speed(told: float) -> float:
    """Return bytes per second as a storage told them; 0 is not known."""
    return told if 0.0 < told < inf else 0.0


def host_pool_created(step: Step, storage: Storage, message: HostPoolCreated) -> None:
    """Note a host pool that is ready: its node's workers may load from it.

    A hidden pool is passed on to :mod:`hidden_form`; a pool of another geometry is refused and counted.
    """
    state = step.state
    if message.form == HIDDEN:
        hidden_pool_created(step, storage, message)
        return
    handle = message.handle
    if handle is None or not 1 <= handle.pages <= MOST_PAGES or handle.geometry != state.geometry:
        state.count("host_pools_refused")
        return
    if storage.pool is not None or f"{HOST}/{storage.storage_id}" in state.lost:
        state.count("stale_inputs")
        return
    storage.handle, storage.pool = handle, new_pool(handle.pages)
    fit_pools(state)
    for worker in workers_of(state, storage):
        step.to_worker(worker, AttachHostPool(storage_id=storage.storage_id, handle=handle))
    save_what_devices_hold(step, storage)


def remove_storage(step: Step, storage: Storage, *, has_left: bool = False) -> None:
    """Remove a storage that is gone with its host pool. Loads in flight from it are settled by their batches.

    ``has_left``: it said so itself; otherwise it counts as lost.
    """
    state = step.state
    state.count("storages_left" if has_left else "storages_lost")
    abandon_backups_of_storage(step, storage)
    abandon_saves_of_storage(step, storage)
    abandon_fetches(step, storage, is_lost=True)
    forget_lender(state, storage)
    forget_node_drain(step, storage)
    has_pools = storage.handle is not None or storage.hidden.handle is not None
    drop_hidden_pool(step, storage)
    forget_host_copies(step, storage)
    del state.storages[storage.storage_id]
    for worker in workers_of(state, storage):
        if has_pools:
            step.to_worker(worker, DetachHostPool(storage_id=storage.storage_id))
