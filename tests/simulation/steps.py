"""What a step of a simulated worker does with pages: loads, restorations, sparse prefixes and chunks of prompts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shared.chunks import chunk_tokens
from shared.messages import worker_events
from shared.messages import worker_plans as plans
from shared.messages.base import pack_int32, unpack_int32
from tests.simulation.contents import GARBAGE, Copy, HostPool, Page, WrongContent, lossy_root, pieces, require
from tests.simulation.sequence import Sequence
from tests.stateful.model_pages import geometry

if TYPE_CHECKING:
    from tests.simulation.worker_process import WorkerProcess


@dataclass
class _Report:
    """What a step has to say of its batch. ``unloaded`` are device pages whose load failed."""

    failed: list[str] = field(default_factory=list)
    failures: list[worker_events.LoadFailure] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    read: list[worker_events.SparseLoaded] = field(default_factory=list)
    unloaded: dict[int, None] = field(default_factory=dict)
    loaded_tokens: int = 0
    restored_tokens: int = 0


def run_batch(worker: WorkerProcess, order: plans.RunBatch) -> worker_events.BatchDone:
    """Loads, then restorations and chunks. Says what failed; times and the plan's number are the caller's."""
    report = _Report()
    for load in order.loads:
        _run_load(worker, load, report)
    for restore in order.restores:
        _run_restore(worker, restore, report)
    for chunk in order.chunks:
        _run_chunk(worker, chunk, report)
    return worker_events.BatchDone(
        **worker.who(),
        plan=0,
        failed=tuple(report.failed),
        load_failures=tuple(report.failures),
        loaded_tokens=report.loaded_tokens,
        restored_tokens=report.restored_tokens,
        restores_refused=tuple(report.refused),
        sparse_refused=tuple(report.unread),
        sparse_loaded=tuple(report.read),
    )


def _run_load(worker: WorkerProcess, load: plans.PageLoad, report: _Report) -> None:
    failure = _load(worker, load, report.unloaded)
    if failure is None:
        report.loaded_tokens += len(load.device_pages) // 4 * worker.cell.scenario.shape.page_size
        return
    report.failures.append(failure)
    sequence = worker.known(load.request_id, load.attempt)
    if sequence is not None:
        sequence.has_failed = True


def _run_restore(worker: WorkerProcess, restore: plans.RestoreChunk, report: _Report) -> None:
    sequence = _standing(worker, restore.request_id, restore.attempt, restore.start, report.unloaded)
    if sequence is None:
        report.failed.append(restore.request_id)
    elif _restore(worker, sequence, restore):
        report.restored_tokens += restore.end - restore.start
    else:
        sequence.has_failed = True
        report.failed.append(restore.request_id)
        report.refused.append(restore.request_id)


def _run_chunk(worker: WorkerProcess, chunk: plans.PrefillChunk, report: _Report) -> None:
    sequence = _standing(worker, chunk.request_id, chunk.attempt, chunk.start, report.unloaded)
    if sequence is None:
        report.failed.append(chunk.request_id)
        return
    if sequence.is_lossy and not sequence.has_read_sparse:
        read = _read_in_part(worker, sequence)
        if read is None:
            sequence.has_failed = True
            report.failed.append(chunk.request_id)
            report.unread.append(chunk.request_id)
            return
        report.read.append(read)
    if worker.fails_next_chunk or worker.chance.random() < worker.cell.scenario.rates.bad_chunks:
        worker.fails_next_chunk, sequence.has_failed = False, True
        worker.cell.note_failure(chunk.request_id)
        report.failed.append(chunk.request_id)
        return
    require(chunk.start == sequence.computed, f"a chunk of {chunk.request_id} leaves a gap")
    require(chunk.start < chunk.end <= len(sequence.tokens), f"a chunk of {chunk.request_id} is beyond its tokens")
    worker.attend(sequence, chunk.start)
    worker.write(sequence, chunk.start, chunk.end)


def _standing(
    worker: WorkerProcess, request_id: str, attempt: int, start: int, unloaded: dict[int, None]
) -> Sequence | None:
    """The sequence that is to go on from ``start``; None where it is gone, failed, or stands on a page without KV."""
    sequence = worker.known(request_id, attempt)
    if sequence is None or sequence.has_failed:
        return None
    if any(page in unloaded for page in sequence.pages[: -(-start // worker.cell.scenario.shape.page_size)]):
        sequence.has_failed = True
        worker.cell.note_failure(request_id)
        return None
    return sequence


def copy_up(worker: WorkerProcess, order: plans.PageLoad | plans.PromotePages, pool: HostPool | None) -> list[int]:
    """Copy host pages to the device, verifying each; returns those that did not verify."""
    pairs = zip(unpack_int32(order.host_pages), unpack_int32(order.device_pages), strict=True)
    bad = []
    for (host, device), identity in zip(pairs, pieces(order.identities), strict=True):
        copy = pool.memory.get(host) if pool is not None else None
        if copy is not None and copy.is_good(identity):
            worker.memory[device] = copy.page
            continue
        if worker.is_listed and pool is not None and (copy is None or not copy.is_corrupt):
            raise WrongContent(f"host page {host} of {pool.name} holds {copy}, which is not what was to be loaded")
        worker.memory[device] = GARBAGE
        bad.append(host)
    return bad


def _load(worker: WorkerProcess, load: plans.PageLoad, unloaded: dict[int, None]) -> worker_events.LoadFailure | None:
    """Fill device pages. A load that fails is undone as a whole, and takes place even if its request is gone."""
    device_pages = unpack_int32(load.device_pages)
    worker.forbid_promoting(device_pages)
    by_chance = worker.chance.random() < worker.cell.scenario.rates.bad_loads
    bad, reason = pack_int32([]), ""
    if load.neighbour_id:
        if by_chance or not _copy_over(worker, load):
            bad, reason = load.host_pages, "not mapped"
    elif worker.hosts.get(load.storage_id) is None:
        bad, reason = load.host_pages, "not mapped"
    else:
        bad = pack_int32(copy_up(worker, load, worker.hosts[load.storage_id]))
        if by_chance and not bad:
            bad = load.host_pages
        reason = "checksum mismatch" if bad else ""
    if not reason:
        return None
    worker.memory.update(dict.fromkeys(device_pages, GARBAGE))
    unloaded.update(dict.fromkeys(device_pages))
    worker.cell.note_failure(load.request_id)
    return worker_events.LoadFailure(
        storage_id=load.storage_id, host_pages=bad, reason=reason, neighbour_id=load.neighbour_id
    )


def _copy_over(worker: WorkerProcess, load: plans.PageLoad) -> bool:
    """Copy pages of another device; nothing but the scheduler vouches for what they hold."""
    neighbour = worker.neighbours.get(load.neighbour_id)
    if neighbour is None or neighbour.incarnation != load.neighbour_incarnation or not neighbour.is_running:
        return False
    pairs = zip(unpack_int32(load.host_pages), unpack_int32(load.device_pages), strict=True)
    for (theirs, mine), identity in zip(pairs, pieces(load.identities), strict=True):
        page = neighbour.memory.get(theirs)
        is_right = page is not None and page.identity() == identity
        if not is_right and worker.is_listed and neighbour.is_listed:
            raise WrongContent(f"{load.neighbour_id} page {theirs} holds {page}, which is not what was to be copied")
        worker.memory[mine] = page if page is not None else GARBAGE
    return True


def _restore(worker: WorkerProcess, sequence: Sequence, order: plans.RestoreChunk) -> bool:
    """Make KV of hidden pages, verifying each; returns whether all were good."""
    size = worker.cell.scenario.shape.page_size
    require(order.start == sequence.computed, f"a restoration of {order.request_id} leaves a gap")
    require(order.end < len(sequence.tokens), f"a restoration of {order.request_id} leaves nothing to compute")
    pool = worker.hidden_pools.get(order.storage_id)
    tokens: list[int] = []
    for place, identity in zip(unpack_int32(order.hidden_pages), pieces(order.identities), strict=True):
        copy: Copy | None = pool.memory.get(place) if pool is not None else None
        if copy is None or not copy.is_good(identity):
            if worker.is_listed and pool is not None and not (copy is not None and copy.is_corrupt):
                raise WrongContent(f"hidden page {place} holds {copy}, which is not what was to be restored")
            return False
        if copy.page.identity() != identity:
            raise WrongContent(f"hidden page {place} holds {copy.page} under another's identity")
        tokens += copy.page.tokens
    if worker.chance.random() < worker.cell.scenario.rates.bad_restores:
        return False
    require(len(tokens) == order.end - order.start, "a restoration has another number of pages")
    require(order.end % size == 0, "a restoration ends within a page")
    require(tokens == sequence.tokens[order.start : order.end], "a restoration of other tokens")
    worker.attend(sequence, order.start)
    sequence.write(order.start, order.end)
    sequence.computed = order.end
    return True


def _read_in_part(worker: WorkerProcess, sequence: Sequence) -> worker_events.SparseLoaded | None:
    """Read the sparse prefix of a sequence from the disk; None where a chunk of it cannot be read."""
    order = sequence.admit.sparse
    assert order is not None
    storage = worker.cell.storages.get(order.storage_id)
    if storage is None or not storage.can_answer or worker.is_cut_off:
        return None
    names = pieces(order.chunks)
    if worker.chance.random() < worker.cell.scenario.rates.bad_sparse or not all(map(storage.disk.can_read, names)):
        return None
    root = lossy_root(sequence.request_id, sequence.admit.attempt)
    for number in unpack_int32(order.pages):
        worker.memory[number] = Page(root)
    sequence.has_read_sparse = True
    shape = worker.cell.scenario.shape
    chosen = int(order.importance.ratio * chunk_tokens(shape.page_size) * geometry(shape.page_size).token_bytes) or 1
    read_us = chosen * 1_000_000 // shape.disk_bytes_per_s if shape.disk_bytes_per_s else 10
    return worker_events.SparseLoaded(
        request_id=sequence.request_id,
        attempt=sequence.admit.attempt,
        shares=bytes(64 + name[0] % 64 for name in names),
        disk_bytes=chosen * len(names),
        read_us=read_us * len(names),
    )
