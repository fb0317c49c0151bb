"""What computing and loading cost on a worker, and a disk on a storage, measured from their reports (Strata 4.3.2).

Eviction, placement and batch formation all ask here, so that they weigh the same costs.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from shared.chunks import chunk_bytes, chunk_tokens
from shared.ids import DIGEST_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from services.scheduler.core.speed_fit import SpeedFit
    from services.scheduler.core.state import CellState, Storage, Worker
    from services.scheduler.core.tiers.under_way import Batch, Chunk, Fetch
    from shared.messages.storage_events import ChunksFetched
    from shared.messages.worker_events import BatchDone


PAPERS_RATIO = 100.0
"""Loaded tokens per computed token at which stalls begin, where nothing was measured (Strata 4.3.2)."""

UNMEASURED_COMPUTE_US = 100.0

_RUNNING_TOKENS = 8
"""Each step also carries a token of every decoding request: what that costs, in prefill tokens."""

UNMEASURED_DISK_BYTES_PER_US = 1000.0
"""A disk that was not measured, that has brought nothing yet and whose storage names no limit: 1 GB/s."""

UNMEASURED_LENDER_BYTES_PER_US = inf
"""Another node's memory before anything came from there: it costs nothing yet, so that it is tried."""


def observe(state: CellState, worker: Worker, batch: Batch, message: BatchDone) -> None:
    """Learn from an executed batch. Times in which the step waited for loads are not counted as computation."""
    for fit in (worker.speed, state.speed):
        fit.note_load(message.loaded_tokens, message.load_us)
    if not message.restores_refused:
        worker.restoring.note(message.restored_tokens, message.restore_us)
    computed = [chunk for chunk in batch.chunks if not chunk.is_restored]
    planned = sum(chunk.end - chunk.start for chunk in computed)
    if message.failed or message.load_failures or message.computed_tokens != planned:
        return  # What was computed twice, or not at all, says nothing of speed.
    if message.sparse_loaded or any(_is_lossy(state, chunk) for chunk in computed):
        return  # The step waited for its reads, or attended to less than the depth of its tokens says.
    context = sum((chunk.end - chunk.start) * (chunk.start + chunk.end) // 2 for chunk in computed)
    for fit in (worker.speed, state.speed):
        fit.note_compute(planned, context, message.compute_us - max(0, message.stall_us))


def _is_lossy(state: CellState, chunk: Chunk) -> bool:
    """Whether a chunk stands on a sparse prefix. Does not mutate."""
    request = state.requests.get(chunk.request_id)
    return request is not None and request.sparse.span is not None


def recompute_us(state: CellState, worker: Worker, depth: int, tokens: int) -> float:
    """Time to compute the KV of ``tokens`` after ``depth`` tokens of context. Does not mutate."""
    fit = compute_fit(state, worker)
    return fit.compute_us(depth, tokens) if fit.reports else tokens * UNMEASURED_COMPUTE_US


def count_saved_prefill(state: CellState, worker: Worker, tokens: int) -> None:
    """Add to ``prefill_saved_us`` the time that computing a reused prefix of ``tokens`` would have taken."""
    if has_compute_speed(state, worker):
        state.count("prefill_saved_us", round(recompute_us(state, worker, 0, tokens)))


def token_us(state: CellState, worker: Worker) -> float:
    """Time of a computed token without context: what a backlog is measured by. Does not mutate."""
    return worker.speed.flat or _unmeasured_token_us(state)


def _unmeasured_token_us(state: CellState) -> float:
    """Return the same for a worker that has reported nothing yet."""
    return state.speed.flat or UNMEASURED_COMPUTE_US


def backlog_us(state: CellState, worker: Worker) -> float:
    """Time that what a worker has to do takes before a request that joins its queue now. Does not mutate."""
    return backlogs_us(state, (worker,))[worker.worker_id]


def backlogs_us(state: CellState, workers: Iterable[Worker]) -> dict[str, float]:
    """Return the same for many workers, by name: placement asks for all of a cell with every request. Does not
    mutate.
    """
    unmeasured = _unmeasured_token_us(state)
    backlogs = {}
    for worker in workers:
        work = worker.work
        tokens = work.unplanned + work.outstanding + len(work.running) * _RUNNING_TOKENS
        backlogs[worker.worker_id] = worker.line.cost + tokens * (worker.speed.flat or unmeasured)
    return backlogs


def load_us(state: CellState, worker: Worker, tokens: int) -> float:
    """Time to load ``tokens`` from the host pool. Does not mutate."""
    fit = _load_fit(state, worker)
    if fit.loads:
        return tokens * fit.load_us / fit.loaded_tokens
    # Where only computation was measured, the paper's ratio says more than a guess in microseconds.
    return recompute_us(state, worker, 0, tokens) / PAPERS_RATIO


def loaded_token_us(state: CellState, worker: Worker) -> float:
    """Time to load a token from host memory: as observed or, before that, by a profile's link. Does not mutate."""
    profile, geometry = worker.restoration, state.geometry
    is_known = worker.speed.loads or state.speed.loads
    if is_known or profile is None or geometry is None or profile.link_bytes_per_us <= 0:
        return load_us(state, worker, 1)
    return geometry.token_bytes / profile.link_bytes_per_us


def load_compute_ratio(state: CellState, worker: Worker, context: int) -> float:
    """Return the loaded tokens that take as long as one computed token after ``context`` others. Does not mutate.

    The configured ratio, or what was measured, or the paper's where either side is not known yet.
    """
    if state.config.load_compute_ratio > 0:
        return state.config.load_compute_ratio
    computing, loading = compute_fit(state, worker), _load_fit(state, worker)
    if not computing.reports or not loading.loads:
        return PAPERS_RATIO
    return computing.compute_us(context, 1) * loading.loaded_tokens / loading.load_us


def disk_bytes_per_us(storage: Storage) -> float:
    """How fast a storage's disk is read, as observed; before that as it was measured, its limit, or a guess. Does not
    mutate.
    """
    return storage.fetching.disk_rate.per_us(expected_disk_bytes_per_us(storage))


def lender_bytes_per_us(storage: Storage) -> float:
    """How fast a storage reads other nodes' host memory, as observed; before that without limit. Does not mutate."""
    return storage.fetching.lender_rate.per_us(UNMEASURED_LENDER_BYTES_PER_US)


def lent_cost(state: CellState, storage: Storage) -> float:
    """Return the cost of a token that another node lends, relative to computing one at the top: 1, the neutral value,
    where nothing is lent or was measured, and at the most. Does not mutate.
    """
    geometry, rate = state.geometry, storage.fetching.lender_rate
    if geometry is None or not rate.observations or state.speed.flat <= 0:
        return 1.0
    _, loading = state.speed.restoration_costs()
    return min(1.0, loading + geometry.token_bytes / rate.per_us(0.0) / state.speed.flat)


def expected_disk_bytes_per_us(storage: Storage) -> float:
    """Return the same without any observation. Pure."""
    return _measured_disk_bytes_per_us(storage) or UNMEASURED_DISK_BYTES_PER_US


def planned_disk_bytes_per_us(storage: Storage) -> float:
    """How fast the disk is read, for what is decided once and stays: as it was measured before the storage joined, so
    that no observation under load moves it. A disk that was not measured is taken as observed; 0 is not known yet.
    Does not mutate.
    """
    measured = _measured_disk_bytes_per_us(storage)
    if measured or storage.fetching.disk_rate.observations:
        return measured or disk_bytes_per_us(storage)
    return 0.0 if storage.disk.budget_bytes else UNMEASURED_DISK_BYTES_PER_US


def _measured_disk_bytes_per_us(storage: Storage) -> float:
    """Return the lesser of the disk's measured speed and its limit; 0 where neither is known. Pure."""
    known = [each for each in (storage.fetching.measured_bytes_per_s, storage.fetching.disk_bytes_per_s) if each > 0]
    return min(known) / 1e6 if known else 0.0


def compute_fit(state: CellState, worker: Worker) -> SpeedFit:
    """Return the worker's own measurement, or that of all workers together: they run the same model."""
    return worker.speed if worker.speed.reports else state.speed


def _load_fit(state: CellState, worker: Worker) -> SpeedFit:
    return worker.speed if worker.speed.loads else state.speed


_KEPT = 0.9
"""Part of what is known that a further report leaves standing, so that a disk may change its speed."""


def note_fetch(state: CellState, storage: Storage, fetch: Fetch, message: ChunksFetched) -> None:
    """Learn from a fetch that is over. One that the object store took part in says nothing of the disk.

    In the time that the storage says, the disk also read what was ordered before.
    """
    geometry = state.geometry
    if geometry is None or message.remote_chunks or message.nbytes < 1 or not message.seconds > 0:
        return
    if fetch.lender_id:
        storage.fetching.lender_rate.note(message.nbytes, message.seconds * 1e6)
        return
    tokens = message.nbytes * geometry.page_size / geometry.page_bytes
    storage.fetching.disk_rate.note(fetch.queued_bytes + message.nbytes, message.seconds * 1e6)
    storage.fetching.tokens = storage.fetching.tokens * _KEPT + tokens
    storage.fetching.us = storage.fetching.us * _KEPT + message.seconds * 1e6


def disk_us(state: CellState, worker: Worker, storage: Storage, tokens: int) -> float:
    """Time to bring ``tokens`` from the disk to the device. Does not mutate.

    Until the disk was measured it costs no more than what host memory does, so that it is tried.
    """
    loading = load_us(state, worker, tokens)
    if not storage.fetching.tokens:
        return loading
    return loading + tokens * storage.fetching.us / storage.fetching.tokens


def has_compute_speed(state: CellState, worker: Worker) -> bool:
    """Whether any worker of the cell has reported how long it computes. Does not mutate."""
    return bool(worker.speed.reports or state.speed.reports)


def queued_bytes(state: CellState, storage: Storage) -> float:
    """Return what fetches in flight still have to bring from this storage's disk, in either form. Does not mutate."""
    name, total = storage.storage_id, 0
    for fetch in state.fetches.values():
        if fetch.storage_id == name and not fetch.lender_id and not fetch.is_called_off and state.geometry is not None:
            total += (len(fetch.names) // DIGEST_BYTES - fetch.chunks) * chunk_bytes(state.geometry)
    for hidden_fetch in state.hidden_fetches.values():
        request = state.requests.get(hidden_fetch.request_id)
        if (
            hidden_fetch.storage_id == name
            and request is not None
            and request.hidden.run is not None
            and storage.hidden.handle
        ):
            left = (request.hidden.run.end - request.hidden.run.arrived) // chunk_tokens(state.tree.page_size)
            total += left * chunk_bytes(storage.hidden.handle.geometry)
    return float(total)
