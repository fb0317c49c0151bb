"""What must hold of state pools, state leases and saves of state, checked from scratch. For tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.prefix_tree import PAGE_NUMBER_BYTES
from services.scheduler.core.hidden.hidden_runs import pages_of_runs
from services.scheduler.core.lifecycle import ADMITTED
from services.scheduler.core.tiers.catalogue import most_chunks
from shared.chunks import chunk_pages, chunk_tokens
from shared.errors import InvariantViolated
from shared.ids import DIGEST_BYTES, split_digests

if TYPE_CHECKING:
    from services.scheduler.core.hidden.hidden_in_flight import HiddenLease, HiddenSave
    from services.scheduler.core.state import CellState, Storage


def check_state(state: CellState) -> None:
    """Raise InvariantViolated if leases, saves, what storages expect of them and deadlines contradict one another."""
    for lease in state.leases.values():
        _check_lease(state, lease)
    for save in state.hidden_saves.values():
        _check_save(state, save)
    for storage in state.storages.values():
        _check_storage(state, storage)
    for request in state.requests.values():
        lease_of = state.leases.get(request.lease)
        is_its = lease_of is not None and lease_of.request_id == request.request_id
        _require(not request.lease or is_its, f"{request.request_id} has a lease that is not its own")


def state_pages(state: CellState, storage: Storage) -> list[bytes]:
    """Pages of a state pool (packed) that are in use, each user's on its own. Does not mutate."""
    name = storage.storage_id
    leased = [lease.pages for lease in state.leases.values() if lease.storage_id == name]
    saved = [save.pages for save in state.hidden_saves.values() if save.storage_id == name]
    return [*leased, *saved, pages_of_runs(state, storage)]


def _check_lease(state: CellState, lease: HiddenLease) -> None:
    name = f"state lease {lease.lease_id}"
    page_size = state.tree.page_size
    storage, worker = state.storages.get(lease.storage_id), state.workers.get(lease.worker_id)
    _require(storage is not None and storage.hidden_pool is not None, f"{name} is of no pool")
    _require(worker is not None and storage is not None and worker.node == storage.node, f"{name} is of no worker")
    chunks = _whole_chunks(lease.pages, page_size)
    _require(chunks > 0, f"{name} is not of whole chunks")
    _require(lease.depth % chunk_tokens(page_size) == 0, f"{name} begins within a chunk")
    _require(len(lease.names) // DIGEST_BYTES <= chunks, f"{name} saves more chunks than it has pages")
    request = state.requests.get(lease.request_id)
    if request is None:
        _require(not lease.request_id, f"{name} is of a request that is gone")
        timer = state.timers.get(lease.timer_id)
        _require(timer is not None and timer.subject == str(lease.lease_id), f"{name} may never end")
        return
    _require(request.lease == lease.lease_id, f"{name} is of a request that has another")
    is_there = request.state in ADMITTED and request.worker_id == lease.worker_id
    _require(is_there, f"{name} is of a request that does not run at its worker")
    _require(not lease.timer_id, f"{name} has a deadline while its request runs")
    _require(lease.depth >= (request.run.goal if request.run is not None else 0), f"{name} saves what is restored")


def _check_save(state: CellState, save: HiddenSave) -> None:
    name = f"save {save.save_id} of state"
    _require(save.save_id not in state.saves, f"{name} is one of KV, too")
    storage = state.storages.get(save.storage_id)
    _require(storage is not None and storage.hidden_pool is not None, f"{name} is of no pool")
    _require(save.is_late != (save.timer_id in state.timers), f"{name} has a wrong deadline")
    chunks = _whole_chunks(save.pages, state.tree.page_size)
    _require(0 < chunks == len(save.names) // DIGEST_BYTES, f"{name} has another number of pages")


def _check_storage(state: CellState, storage: Storage) -> None:
    name = storage.storage_id
    _require(state.is_configured or not storage.is_pool_requested, f"{name} was asked for a pool without settings")
    _require(storage.is_pool_requested or not storage.is_hidden_requested, f"{name} was asked for a state pool first")
    _require((storage.hidden_pool is None) == (storage.hidden_handle is None), f"{name} has a state pool only in part")
    _require(storage.hidden_pool is None or storage.is_hidden_requested, f"{name} has a state pool that nobody wanted")
    saving: dict[bytes, int] = {}
    for lease in state.leases.values():
        for chunk in split_digests(lease.names) if lease.storage_id == name else ():
            _require(chunk not in saving, f"a chunk of state lease {lease.lease_id} is saved twice")
            saving[chunk] = lease.lease_id
    for save in state.hidden_saves.values():
        for chunk in split_digests(save.names) if save.storage_id == name else ():
            _require(chunk not in saving, f"a chunk of save {save.save_id} is saved twice")
            saving[chunk] = save.lease_id
    _require(storage.hidden_saving == saving, f"{name} saves state of other chunks than it thinks")
    most = most_chunks(state, storage, "state")
    _require(len(storage.hidden_chunks) <= most, f"{name} has more chunks of state than room for them")


def _whole_chunks(pages: bytes, page_size: int) -> int:
    """Chunks of packed pages; 0 where they are not whole."""
    chunks, rest = divmod(len(pages), chunk_pages(page_size) * PAGE_NUMBER_BYTES)
    return 0 if rest else chunks


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise InvariantViolated(text)
