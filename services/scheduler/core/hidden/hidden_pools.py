"""State pools: asked for once it is known which form of state is worth keeping, mapped by the node's workers.

A storage has one at the most, of one geometry for its incarnation. It is room for state on its way to the disk and
back; nothing is cached in it, so each of its pages is free, leased to a request that is being computed, being saved,
or being fetched or restored from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.page_pool import new_pool
from services.scheduler.core.hidden.hidden_form import _is_of_this_cell, wanted_hidden
from services.scheduler.core.hidden.hidden_leases import drop_leases_of_storage
from services.scheduler.core.hidden.hidden_saves import abandon_hidden_saves
from shared.messages.storage_plans import CreateHostPool
from shared.messages.worker_plans import AttachHostPool

if TYPE_CHECKING:
    from services.scheduler.core.state import Storage, Worker
    from services.scheduler.core.step import Step
    from shared.messages.storage_events import HostPoolCreated


def request_hidden_pool(step: Step, storage: Storage) -> None:
    """Ask for a state pool if there is none yet and state is worth keeping there by what is known now.

    Its form stays, so it is chosen by settings that were said, never by the defaults: the pool comes behind the host
    pool, which waits for them.
    """
    is_possible = storage.state_bytes > 0 and (storage.disk_bytes > 0 or storage.has_remote)
    if storage.is_hidden_requested or not storage.is_pool_requested or not is_possible:
        return
    geometry = wanted_hidden(step.state, storage)
    if geometry is not None:
        storage.is_hidden_requested = True
        step.to_storage(storage, CreateHostPool(geometry=geometry))


def request_hidden_pools(step: Step) -> None:
    """Ask for the state pools that are not asked for yet, after what decides it has changed."""
    for storage in step.state.storages.values():
        if any(worker.node == storage.node for worker in step.state.workers.values()):
            request_hidden_pool(step, storage)


def hidden_pool_created(step: Step, storage: Storage, message: HostPoolCreated) -> None:
    """A state pool is ready, or could not be made: its node's workers may write to it and read from it."""
    state, handle = step.state, message.handle
    if not storage.is_hidden_requested or storage.hidden_pool is not None:
        state.count("stale_inputs")
        return
    if handle is None or handle.pages < 1 or not _is_of_this_cell(step, message):
        state.count("state_pools_refused")
        return
    storage.hidden_handle, storage.hidden_pool = handle, new_pool(handle.pages)
    for worker in state.workers.values():
        if worker.node == storage.node:
            attach_hidden_pool(step, storage, worker)


def attach_hidden_pool(step: Step, storage: Storage, worker: Worker) -> None:
    """Have a worker map the storage's state pool, if there is one."""
    if storage.hidden_handle is not None:
        step.to_worker(worker, AttachHostPool(storage_id=storage.storage_id, handle=storage.hidden_handle))


def drop_hidden_pool(step: Step, storage: Storage) -> None:
    """The pool is gone, with its storage or for one of another geometry: everything that was in it is void."""
    drop_leases_of_storage(step, storage)
    abandon_hidden_saves(step, storage)
    storage.hidden_handle = storage.hidden_pool = None
    storage.is_hidden_requested = False
    storage.hidden_chunks, storage.hidden_saving = {}, {}
