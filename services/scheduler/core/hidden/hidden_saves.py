"""Saves of hidden states, and the pools that hold them meanwhile.

Hidden states that a worker has sealed go from the hidden pool to the disk, and their pages are free after that. These
saves share numbers, deadlines and the storage's limit of late saves with the saves of KV (:mod:`saves`). A chunk whose
save fails is known in neither form then; its KV is saved at the next occasion, when a request that reuses it is
computed or ends.

A hidden pool is asked for once it is known which layer mix is worth keeping, and the node's workers map it. A storage
has one at most, of one geometry for its incarnation. It is room for hidden states in transit to the disk and back;
nothing is cached in it, so each of its pages is free, leased to a request that is being computed, being saved, or being
fetched or restored from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.page_pool import MOST_PAGES, new_pool
from services.scheduler.core.cache.prefix_tree import PAGE_NUMBER_BYTES
from services.scheduler.core.hidden.hidden_form import _is_of_this_cell, wanted_hidden
from services.scheduler.core.hidden.hidden_in_flight import HiddenSave, OpenHiddenLease
from services.scheduler.core.tiers.catalogue import chunks_added, chunks_gone, is_hidden_kept
from services.scheduler.core.tiers.save_runs import stretches
from services.scheduler.core.tiers.saves import ORDER_CHUNKS, SAVING_CHUNKS, may_save
from services.scheduler.core.tiers.under_way import PACKED_NOWHERE
from shared.chunks import chunk_names, chunk_pages, chunk_tokens
from shared.compact_messages import chunks_saved, compact_save
from shared.ids import DIGEST_BYTES, TOKEN_BYTES, chain_pages, split_digests
from shared.messages.pools import HIDDEN
from shared.messages.storage_plans import CreateHostPool, SaveChunks
from shared.messages.worker_plans import AttachHostPool

if TYPE_CHECKING:
    from services.scheduler.core.state import CellState, Storage, Worker
    from services.scheduler.core.step import Step
    from shared.messages.storage_events import ChunksSaved, HostPoolCreated


def save_hidden(step: Step, storage: Storage, lease: OpenHiddenLease, tokens: bytes) -> None:
    """Save the chunks that a finished lease has brought, unless their hidden states are kept or being saved already.

    ``tokens`` (packed int32) are those of its first chunks. The pages of all other chunks are free at once.
    """
    state = step.state
    each = chunk_pages(state.tree.page_size)
    identities = chain_pages(lease.parent, tokens, state.tree.page_token_bytes)
    names = chunk_names(identities, each)
    new = [index for index, name in enumerate(names) if not is_hidden_kept(storage, name)]
    room = _room(state, storage)
    state.count("hidden_saves_refused_chunks", max(0, len(new) - room))
    runs = stretches(new[:room], ORDER_CHUNKS) if room and new else []
    for start, end in runs:
        _order(step, storage, lease, tokens, identities, start, end)
    chunk_bytes = each * PAGE_NUMBER_BYTES
    taken = bytearray(len(lease.pages) // chunk_bytes)
    for start, end in runs:
        taken[start:end] = b"\x01" * (end - start)
    left = [lease.pages[at * chunk_bytes : (at + 1) * chunk_bytes] for at, is_taken in enumerate(taken) if not is_taken]
    give_back_hidden(state, storage, b"".join(left))


def _room(state: CellState, storage: Storage) -> int:
    """Return how many more hidden chunks may be ordered to be saved now."""
    if not may_save(storage) or state.config.disk_writes == "off":
        return 0
    saves = [save for save in state.hidden_saves.values() if save.storage_id == storage.storage_id]
    return max(0, SAVING_CHUNKS - sum(len(save.names) // DIGEST_BYTES for save in saves))


def _order(
    step: Step, storage: Storage, lease: OpenHiddenLease, tokens: bytes, identities: bytes, start: int, end: int
) -> None:
    """Order the storage to save chunks [start, end) of a lease."""
    state = step.state
    size, each = chunk_tokens(state.tree.page_size), chunk_pages(state.tree.page_size)
    low, high = start * each, end * each
    save_id = state.next_save
    state.next_save += 1
    own = identities[low * DIGEST_BYTES : high * DIGEST_BYTES]
    save = HiddenSave(
        save_id=save_id,
        storage_id=storage.storage_id,
        lease_id=lease.lease_id,
        names=b"".join(chunk_names(own, each)),
        pages=lease.pages[low * PAGE_NUMBER_BYTES : high * PAGE_NUMBER_BYTES],
        timer_id=step.set_timer(f"save.{save_id}", "save", str(save_id), state.config.save_deadline_ms),
    )
    state.hidden_saves[save_id] = save
    storage.hidden.saving |= dict.fromkeys(split_digests(save.names), lease.lease_id)
    state.count("hidden_saves_started")
    order = SaveChunks(
        save_id=save_id,
        namespace=lease.namespace,
        depth=lease.depth + start * size,
        tokens=tokens[start * size * TOKEN_BYTES : end * size * TOKEN_BYTES],
        parent=identities[(low - 1) * DIGEST_BYTES : low * DIGEST_BYTES] if low else lease.parent,
        identities=own,
        host_pages=save.pages,
        device_pages=PACKED_NOWHERE * (high - low),
        key_id=lease.key_id,
        value=lease.value,
        form=HIDDEN,
        quota=state.quotas.disk_quota(state.tree.owner_of(lease.namespace)),
    )
    step.to_storage(storage, compact_save(order) if storage.takes_compact else order)


def finish_hidden_save(step: Step, storage: Storage, save: HiddenSave, message: ChunksSaved) -> None:
    """Finish a save that the storage answered: its pages are free, and the reported chunks are on the disk."""
    state = step.state
    step.cancel_timer(save.timer_id)
    storage.disk.late_saves -= save.is_late
    if not save.is_late:
        state.count("hidden_saves_failed" if message.error else "hidden_saves_done")
    _close(state, storage, save)
    give_back_hidden(state, storage, save.pages)
    saved = chunks_saved(message, save.names)
    state.count("saved_hidden_chunks", len(saved) // DIGEST_BYTES)
    chunks_added(state, storage, saved, HIDDEN)
    # On a small disk a save may displace its own first chunks: a chunk named as saved and as dropped is not there.
    chunks_gone(state, storage, message.dropped, HIDDEN)


def expire_hidden_save(step: Step, save: HiddenSave) -> None:
    """Mark a save as late: the storage gets no further save before it answers, and may still read the pages."""
    state = step.state
    state.count("hidden_saves_failed")
    save.expire()
    state.storages[save.storage_id].disk.late_saves += 1


def abandon_hidden_saves(step: Step, storage: Storage) -> None:
    """Drop the saves of a hidden pool that is gone with its pages."""
    state = step.state
    for save in [save for save in state.hidden_saves.values() if save.storage_id == storage.storage_id]:
        step.cancel_timer(save.timer_id)
        state.count("hidden_saves_failed", 0 if save.is_late else 1)
        storage.disk.late_saves = max(0, storage.disk.late_saves - save.is_late)
        _close(state, storage, save)


def give_back_hidden(state: CellState, storage: Storage, pages: bytes) -> None:
    """Free pages of the hidden pool (packed) that are no longer written or read; due fetches may use them."""
    if storage.hidden.pool is not None and pages:
        storage.hidden.pool.release(pages)
        if storage.fetching.due:
            state.roomy[storage.storage_id] = None


def _close(state: CellState, storage: Storage, save: HiddenSave) -> None:
    del state.hidden_saves[save.save_id]
    for name in split_digests(save.names):
        storage.hidden.saving.pop(name, None)


def drop_leases_of_storage(step: Step, storage: Storage) -> None:
    """Drop the leases in a hidden pool that is gone: later answers of workers are stale."""
    for lease in [lease for lease in step.state.leases.values() if lease.storage_id == storage.storage_id]:
        close_lease(step, lease)


def request_hidden_pool(step: Step, storage: Storage) -> None:
    """Ask for a hidden pool if there is none yet and hidden states are known to be worth keeping there.

    Its form stays, so it is chosen by the configured settings, never by the defaults: the hidden pool comes after the
    host pool, which waits for them.
    """
    is_possible = storage.hidden.pool_bytes > 0 and (storage.disk.budget_bytes > 0 or storage.disk.has_remote)
    if storage.hidden.is_requested or not storage.is_pool_requested or not is_possible:
        return
    geometry = wanted_hidden(step.state, storage)
    if geometry is not None:
        storage.hidden.is_requested = True
        step.to_storage(storage, CreateHostPool(geometry=geometry))


def request_hidden_pools(step: Step) -> None:
    """Ask for missing hidden pools, after a change of what decides about them."""
    for storage in step.state.storages.values():
        if any(worker.node == storage.node for worker in step.state.workers.values()):
            request_hidden_pool(step, storage)


def hidden_pool_created(step: Step, storage: Storage, message: HostPoolCreated) -> None:
    """Note a hidden pool that is ready, and have its node's workers map it; a failed or unfit one is counted."""
    state, handle = step.state, message.handle
    if not storage.hidden.is_requested or storage.hidden.pool is not None:
        state.count("stale_inputs")
        return
    if handle is None or not 1 <= handle.pages <= MOST_PAGES or not _is_of_this_cell(step, message):
        state.count("hidden_pools_refused")
        return
    storage.hidden.handle, storage.hidden.pool = handle, new_pool(handle.pages)
    for worker in state.workers.values():
        if worker.node == storage.node:
            attach_hidden_pool(step, storage, worker)


def attach_hidden_pool(step: Step, storage: Storage, worker: Worker) -> None:
    """Have a worker map the storage's hidden pool, if there is one."""
    if storage.hidden.handle is not None:
        step.to_worker(worker, AttachHostPool(storage_id=storage.storage_id, handle=storage.hidden.handle))


def drop_hidden_pool(step: Step, storage: Storage) -> None:
    """Drop a pool that is gone, with its storage or for one of another geometry: everything in it is void."""
    drop_leases_of_storage(step, storage)
    abandon_hidden_saves(step, storage)
    storage.hidden.handle = storage.hidden.pool = None
    storage.hidden.is_requested = False
    storage.hidden.chunks, storage.hidden.saving = {}, {}


def close_lease(step: Step, lease: OpenHiddenLease) -> None:
    """Forget a lease. ``lease.names`` stay as they were; others may save these chunks again."""
    state = step.state
    del state.leases[lease.lease_id]
    step.cancel_timer(lease.timer_id)
    request = state.requests.get(lease.request_id)
    if request is not None:
        request.hidden.lease = 0
    for name in split_digests(lease.names):
        if state.storages[lease.storage_id].hidden.saving.get(name) == lease.lease_id:
            del state.storages[lease.storage_id].hidden.saving[name]
