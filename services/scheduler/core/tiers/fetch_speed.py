"""How fast a storage brings chunks up from its disk, measured from its reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.rates import load_us
from shared.chunks import chunk_bytes, chunk_tokens
from shared.ids import DIGEST_BYTES

if TYPE_CHECKING:
    from services.scheduler.core.state import CellState, Storage, Worker
    from services.scheduler.core.tiers.under_way import Fetch
    from shared.messages.storage_events import ChunksFetched

_KEPT = 0.9
"""Part of what is known that a further report leaves standing, so that a disk may change its speed."""


def note_fetch(state: CellState, storage: Storage, fetch: Fetch, message: ChunksFetched) -> None:
    """Learn from a fetch that is over. One that the object store took part in says nothing of the disk.

    In the time that the storage says, the disk also read what was ordered before.
    """
    geometry = state.geometry
    if geometry is None or message.remote_chunks or message.nbytes < 1 or not message.seconds > 0:
        return
    tokens = message.nbytes * geometry.page_size / geometry.page_bytes
    storage.disk_rate.note(fetch.queued_bytes + message.nbytes, message.seconds * 1e6)
    storage.fetched_tokens = storage.fetched_tokens * _KEPT + tokens
    storage.fetched_us = storage.fetched_us * _KEPT + message.seconds * 1e6


def disk_us(state: CellState, worker: Worker, storage: Storage, tokens: int) -> float:
    """Time to bring ``tokens`` from the disk to the device. Does not mutate.

    Until the disk was measured it costs no more than what host memory does, so that it is tried.
    """
    loading = load_us(state, worker, tokens)
    if not storage.fetched_tokens:
        return loading
    return loading + tokens * storage.fetched_us / storage.fetched_tokens


def has_compute_speed(state: CellState, worker: Worker) -> bool:
    """Whether any worker of the cell has reported how long it computes. Does not mutate."""
    return bool(worker.speed.reports or state.speed.reports)


def queued_bytes(state: CellState, storage: Storage) -> float:
    """What fetches under way still have to bring from this storage's disk, in either form. Does not mutate."""
    name, total = storage.storage_id, 0
    for fetch in state.fetches.values():
        if fetch.storage_id == name and not fetch.is_cancelled and state.geometry is not None:
            total += (len(fetch.names) // DIGEST_BYTES - fetch.chunks) * chunk_bytes(state.geometry)
    for hidden_fetch in state.hidden_fetches.values():
        request = state.requests.get(hidden_fetch.request_id)
        if (
            hidden_fetch.storage_id == name
            and request is not None
            and request.run is not None
            and storage.hidden_handle
        ):
            left = (request.run.end - request.run.arrived) // chunk_tokens(state.tree.page_size)
            total += left * chunk_bytes(storage.hidden_handle.geometry)
    return float(total)
