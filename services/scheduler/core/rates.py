"""Measured costs of computing and loading on a worker, and of a storage's disk, from their reports (Strata 4.3.2).

Eviction, placement and batch formation all use them, so that they weigh the same costs.
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
"""Cost, in prefill tokens, of the token of one decoding request that each step also carries."""

UNMEASURED_DISK_BYTES_PER_US = 1000.0
"""Speed of a disk that was not measured, has not been read yet, and whose storage names no limit: 1 GB/s."""

UNMEASURED_LENDER_BYTES_PER_US = inf
"""Speed of another node's memory before the first read from there: it costs nothing yet, so that it is tried."""


def observe(state: CellState, worker: Worker, batch: Batch, message: BatchDone) -> None:
    """Learn the worker's speeds from an executed batch. Stalls are not counted as computation."""
    for fit in (worker.speed, state.speed):
        fit.note_load(message.loaded_tokens, message.load_us)
    if not message.restores_refused:
        worker.restoring.note(message.restored_tokens, message.restore_us)
    computed = [chunk for chunk in batch.chunks if not chunk.is_restored]
    planned = sum(chunk.end - chunk.start for chunk in computed)
    if message.failed or message.load_failures or message.computed_tokens != planned:
        return  # Tokens computed twice, or not at all, say nothing of speed.
    if message.sparse_loaded or any(_is_lossy(state, chunk) for chunk in computed):
        return  # The step waited for its reads, or attended to fewer tokens than its depth.
    context = sum((chunk.end - chunk.start) * (chunk.start + chunk.end) // 2 for chunk in computed)
    for fit in (worker.speed, state.speed):
        fit.note_compute(planned, context, message.compute_us - max(0, message.stall_us))


def _is_lossy(state: CellState, chunk: Chunk) -> bool:
    """Return whether a chunk is computed behind a sparse prefix. Changes nothing."""
    request = state.requests.get(chunk.request_id)
    return request is not None and request.sparse.span is not None


def recompute_us(state: CellState, worker: Worker, depth: int, tokens: int) -> float:
    """Return the microseconds to compute the KV of ``tokens`` after ``depth`` tokens of context. Changes nothing."""
    fit = compute_fit(state, worker)
    return fit.compute_us(depth, tokens) if fit.reports else tokens * UNMEASURED_COMPUTE_US


def count_saved_prefill(state: CellState, worker: Worker, tokens: int) -> None:
    """Add to ``prefill_saved_us`` the time that computing a reused prefix of ``tokens`` would have taken."""
    if has_compute_speed(state, worker):
        state.count("prefill_saved_us", round(recompute_us(state, worker, 0, tokens)))


def token_us(state: CellState, worker: Worker) -> float:
    """Return the microseconds of a computed token without context, the unit of backlogs. Changes nothing."""
    return worker.speed.flat or _unmeasured_token_us(state)


def _unmeasured_token_us(state: CellState) -> float:
    """Return the same for a worker that has reported nothing yet."""
    return state.speed.flat or UNMEASURED_COMPUTE_US


def backlog_us(state: CellState, worker: Worker) -> float:
    """Return the microseconds of a worker's work before a request that joins its queue now. Changes nothing."""
    return backlogs_us(state, (worker,))[worker.worker_id]


def backlogs_us(state: CellState, workers: Iterable[Worker]) -> dict[str, float]:
    """Return the same for many workers, by name. Changes nothing.

    Placement needs it for all workers of a cell with every request.
    """
    unmeasured = _unmeasured_token_us(state)
    backlogs = {}
    for worker in workers:
        work = worker.work
        tokens = work.unplanned + work.outstanding + len(work.running) * _RUNNING_TOKENS
        backlogs[worker.worker_id] = worker.line.cost + tokens * (worker.speed.flat or unmeasured)
    return backlogs


def load_us(state: CellState, worker: Worker, tokens: int) -> float:
    """Return the microseconds to load ``tokens`` from the host pool. Changes nothing."""
    fit = _load_fit(state, worker)
    if fit.loads:
        return tokens * fit.load_us / fit.loaded_tokens
    # Where only computation was measured, the paper's ratio is better than a guess in microseconds.
    return recompute_us(state, worker, 0, tokens) / PAPERS_RATIO


def loaded_token_us(state: CellState, worker: Worker) -> float:
    """Return the microseconds to load a token from host memory. Changes nothing.

    As observed or, before that, by the link speed of the worker's profile.
    """
    profile, geometry = worker.restoration, state.geometry
    is_known = worker.speed.loads or state.speed.loads
    if is_known or profile is None or geometry is None or profile.link_bytes_per_us <= 0:
        return load_us(state, worker, 1)
    return geometry.token_bytes / profile.link_bytes_per_us


def load_compute_ratio(state: CellState, worker: Worker, context: int) -> float:
    """Return how many tokens load in the time of computing one after ``context`` others. Changes nothing.

    The configured ratio, or the measured one, or the paper's where either side is not known yet.
    """
    if state.config.load_compute_ratio > 0:
        return state.config.load_compute_ratio
    computing, loading = compute_fit(state, worker), _load_fit(state, worker)
    if not computing.reports or not loading.loads:
        return PAPERS_RATIO
    return computing.compute_us(context, 1) * loading.loaded_tokens / loading.load_us


def disk_bytes_per_us(storage: Storage) -> float:
    """Return the observed speed of a storage's disk; before that the measured one, its limit, or a guess.

    Changes nothing.
    """
    return storage.fetching.disk_rate.per_us(expected_disk_bytes_per_us(storage))


def lender_bytes_per_us(storage: Storage) -> float:
    """Return the observed speed of reading other nodes' host memory; infinite before that. Changes nothing."""
    return storage.fetching.lender_rate.per_us(UNMEASURED_LENDER_BYTES_PER_US)


def lent_cost(state: CellState, storage: Storage) -> float:
    """Return the cost of a token that another node lends, relative to computing one at the top, at most 1.

    1, the neutral value, also where nothing is lent or measured yet. Changes nothing.
    """
    geometry, rate = state.geometry, storage.fetching.lender_rate
    if geometry is None or not rate.observations or state.speed.flat <= 0:
        return 1.0
    _, loading = state.speed.restoration_costs()
    return min(1.0, loading + geometry.token_bytes / rate.per_us(0.0) / state.speed.flat)


def expected_disk_bytes_per_us(storage: Storage) -> float:
    """Return the speed of a storage's disk without any observation. Pure."""
    return _measured_disk_bytes_per_us(storage) or UNMEASURED_DISK_BYTES_PER_US


def planned_disk_bytes_per_us(storage: Storage) -> float:
    """Return the speed of the disk for decisions that are made once and stay. Changes nothing.

    It was measured before the storage joined, so that no observation under load moves it. A disk that was not measured
    is taken as observed; 0 is not known yet.
    """
    measured = _measured_disk_bytes_per_us(storage)
    if measured or storage.fetching.disk_rate.observations:
        return measured or disk_bytes_per_us(storage)
    return 0.0 if storage.disk.budget_bytes else UNMEASURED_DISK_BYTES_PER_US


def is_disk_speed_known(storage: Storage) -> bool:
    """Return whether the disk's speed was measured before the storage joined, or is limited. Pure."""
    return _measured_disk_bytes_per_us(storage) > 0


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
"""Weight that past reports keep at each further one, so that a disk may change its speed."""


def note_fetch(state: CellState, storage: Storage, fetch: Fetch, message: ChunksFetched) -> None:
    """Learn the disk's speed from a fetch that is over, unless the object store took part.

    The reported time also includes the disk's reads for earlier orders.
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
    """Return the microseconds to bring ``tokens`` from the disk to the device. Changes nothing.

    Until the disk was measured it costs no more than host memory, so that it is tried.
    """
    loading = load_us(state, worker, tokens)
    if not storage.fetching.tokens:
        return loading
    return loading + tokens * storage.fetching.us / storage.fetching.tokens


def has_compute_speed(state: CellState, worker: Worker) -> bool:
    """Return whether any worker of the cell has reported how long it computes. Changes nothing."""
    return bool(worker.speed.reports or state.speed.reports)


def queued_bytes(state: CellState, storage: Storage) -> float:
    """Return the bytes that fetches in flight still read from this storage's disk, in either form. Changes nothing."""
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
