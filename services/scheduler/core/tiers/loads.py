"""Loads, to a device from host memory or a neighbour's device: settled when the batch that carried them is answered.

Neighbours are workers of one node, and each may copy pages from the others' devices instead of computing them. A worker
is told whose pools to map as workers of its node come and go. A load from a neighbour reads its device as a load from a
host pool reads host memory: the path that it reads is locked there until the batch that carries the load is answered.
After such a load failed, no other is planned between the two before one of them joins again: only the map of a device
vouches for its pages.

A worker that was given up may only have stood still, and read on when it goes on. Its messages count at a gateway until
that has heard of the request's next attempt. So the pages that it was reading stay locked for as long as that may take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.pins import let_go_of_spoiled
from services.scheduler.core.cache.prefix_tree import PAGE_NUMBER_BYTES, Node, page_count
from services.scheduler.core.cache.residency import (
    cancel_loading,
    finish_loading,
    lock_path,
    prune,
    quarantine,
    unlock_host,
    unlock_path,
)
from services.scheduler.core.lifecycle import ADMITTED
from services.scheduler.core.speed_fit import KV_FROM_DISK
from services.scheduler.core.tiers.under_way import FetchedKv, LateRead, Load
from shared.messages.base import unpack_int32
from shared.messages.worker_plans import AttachNeighbour, DetachNeighbour

if TYPE_CHECKING:
    from services.scheduler.core.request import Request
    from services.scheduler.core.state import CellState, Storage, Worker
    from services.scheduler.core.step import Step
    from services.scheduler.core.tiers.under_way import Batch, Load
    from shared.messages.worker_events import BatchDone


def settle_loads(step: Step, worker: Worker, batch: Batch, message: BatchDone) -> None:
    """Settle the loads of an executed batch: loads that its chunks prove are finished, and the others have failed.

    A chunk that was computed proves everything that its request stands on, its own loads and those of others that it
    joined. A load that stands on another comes after it in the batch.
    """
    state = step.state
    if not batch.loads:
        return
    standing = _standing_requests(state, worker, batch)
    for request in standing:
        if request.request_id not in message.failed:
            _finish(step, worker, batch, loading_upwards(state, worker, request.node) if request.node else [])
    for failure in message.load_failures:
        if any(load.neighbour_id == failure.neighbour_id != "" for load in batch.loads):
            distrust(state, worker, failure.neighbour_id)
    for load in reversed(batch.loads):
        nodes = loading_nodes(state, worker, load)
        if nodes:
            bad = [
                failure.host_pages[: len(failure.host_pages) // 4 * 4]
                for failure in message.load_failures
                if failure.storage_id == load.storage_id and not failure.neighbour_id
            ]
            _fail(step, worker, load, nodes, standing, b"".join(bad))


def settle_loads_of(step: Step, worker: Worker, request: Request, *, is_proven: bool) -> None:
    """Settle the loads of a request that leaves its worker before their batch was reported.

    Proven, they are over and good as far as the request stands on them. Otherwise the worker may still be copying: the
    pages of its own load stay untouched until the batch is answered, and then no chunk of its own vouches for them.
    """
    for batch in worker.work.batches:
        if is_proven:
            if batch.loads and request.node:
                _finish(step, worker, batch, loading_upwards(step.state, worker, request.node))
            continue
        for load in batch.loads:
            if load.request_id == request.request_id and load.attempt == request.attempt:
                load.call_off()


def _standing_requests(state: CellState, worker: Worker, batch: Batch) -> list[Request]:
    """Return the requests of a batch whose attempt still runs on this worker."""
    found = []
    for chunk in batch.chunks:
        request = state.requests.get(chunk.request_id)
        if request is not None and request.attempt == chunk.attempt and request.state in ADMITTED:
            found.append(request)
    return found


def _finish(step: Step, worker: Worker, batch: Batch, proven: list[Node]) -> None:
    """Finish the load of nodes that are on the device now; loads without any node left are over."""
    state = step.state
    known = dict.fromkeys(node.id for node in proven)
    for load in batch.loads:
        storage = state.storages.get(load.storage_id)
        for node in reversed(loading_nodes(state, worker, load)):
            if node.id in known:
                finish_loading(state, node, worker)
                if storage is not None:
                    unlock_host(state, node, storage)
    over = [load for load in batch.loads if worker.worker_id not in state.tree.nodes[load.node].loading]
    for load in over:
        release_neighbour(step, load)
    if over:
        batch.loads = [load for load in batch.loads if worker.worker_id in state.tree.nodes[load.node].loading]


def _fail(step: Step, worker: Worker, load: Load, nodes: list[Node], standing: list[Request], bad_pages: bytes) -> None:
    """Undo the rest of a load. Copies that failed verification are quarantined.

    The requests that stand on it are about to be preempted. The pages go to the request that the load was for, which
    returns them when its worker has released it, or back to the pool: plans are executed in order, so nothing writes to
    them before the worker has forgotten the others too.
    """
    state = step.state
    state.count("loads_failed")
    owner: Request | None = None
    for request in standing:
        is_owner = request.request_id == load.request_id and request.attempt == load.attempt and not load.is_called_off
        _step_back(state, worker, request, nodes, keeps_pages=is_owner)
        owner = request if is_owner else owner
    for node in nodes:
        pages = cancel_loading(state, node, worker)
        if owner is None:
            worker.pool.release(pages)
    release_neighbour(step, load)
    storage = state.storages.get(load.storage_id)
    if storage is not None:
        release_host(step, nodes, storage, bad_pages)
    for node in nodes:
        if node.id in state.tree.nodes:
            prune(state, node)


def _step_back(state: CellState, worker: Worker, request: Request, failed: list[Node], *, keeps_pages: bool) -> None:
    """Take a request off a failed load. The pages that it keeps are private from now on."""
    known = dict.fromkeys(node.id for node in failed)
    path = loading_upwards(state, worker, request.node) if request.node else []
    lost = [node for node in path if node.id in known]
    if not lost:
        return
    top = lost[-1]
    unlock_path(state, state.tree.nodes[request.node], worker)
    above = state.tree.nodes[top.parent]
    request.node = above.id if above.parent else 0
    if request.node:
        lock_path(state, above, worker)
    pages = sum(page_count(state.tree, node) for node in lost)
    request.shared -= pages
    if not keeps_pages:
        first = top.depth // state.tree.page_size
        request.pages = (
            request.pages[: first * PAGE_NUMBER_BYTES] + request.pages[(first + pages) * PAGE_NUMBER_BYTES :]
        )


def release_host(step: Step, nodes: list[Node], storage: Storage, bad_pages: bytes) -> None:
    """Unlock the host copies that a copy up read, lowest first, and quarantine those with bad pages (packed).

    Pins release quarantined copies: a copy kept by their locks would keep good KV from being backed up.
    """
    state = step.state
    bad = dict.fromkeys(unpack_int32(bad_pages))
    spoiled = 0
    for node in nodes:
        held = unpack_int32(node.host_pages(storage.storage_id)) if bad and storage.storage_id in node.host else ()
        if any(page in bad for page in held):
            spoiled += len(held)
            quarantine(state, node, storage)
        unlock_host(state, node, storage)
    if spoiled:
        state.count("quarantined_pages", spoiled)
        let_go_of_spoiled(step)


def loading_nodes(state: CellState, worker: Worker, load: Load) -> list[Node]:
    """Return the nodes that a load fills, lowest first. Does not change the state."""
    return [node for node in loading_upwards(state, worker, load.node) if node.depth >= load.depth]


def copies_up(state: CellState, worker: Worker) -> list[tuple[str, list[Node]]]:
    """Return (storage id, nodes, lowest first) of each load of the worker, and of its promotion.

    Does not change the state.
    """
    found = [
        (load.storage_id, loading_nodes(state, worker, load)) for batch in worker.work.batches for load in batch.loads
    ]
    if worker.moves.promotion is not None:
        nodes = [node for node_id in worker.moves.promotion.nodes for node in loading_upwards(state, worker, node_id)]
        found.append((worker.moves.promotion.storage_id, nodes))
    return found


def loading_upwards(state: CellState, worker: Worker, node_id: int) -> list[Node]:
    """Return this node and its ancestors, as far as they are loading on the worker, lowest first.

    Does not change the state.
    """
    nodes = []
    node = state.tree.nodes[node_id]
    while worker.worker_id in node.loading:
        nodes.append(node)
        node = state.tree.nodes[node.parent]
    return nodes


LATE_READS_MS = 30_000
"""How long late reads stay locked: gateways look for missed notices every ten seconds."""


def attach_neighbours(step: Step) -> None:
    """Tell workers of a node about one another where they do not know yet, if neighbour loads are switched on.

    A worker that drains loads nothing more, and once it may leave, no read from it begins.
    """
    state = step.state
    if not state.is_configured or not state.config.neighbour_loads:
        return
    nodes: dict[str, list[Worker]] = {}
    for worker in state.workers.values():
        nodes.setdefault(worker.node, []).append(worker)
    for members in nodes.values():
        readable = [worker for worker in members if worker.drain is None or not worker.drain.is_over]
        for worker in members:
            for other in readable if worker.drain is None else ():
                if other is not worker and other.worker_id not in worker.moves.neighbours:
                    _attach(step, worker, other)


def _attach(step: Step, worker: Worker, other: Worker) -> None:
    worker.moves.neighbours[other.worker_id] = True
    step.to_worker(
        worker,
        AttachNeighbour(worker_id=other.worker_id, worker_incarnation=other.incarnation, handle=other.handle),
    )


def detach_neighbour(step: Step, worker: Worker) -> None:
    """Detach a worker that is gone, with the reads of others from it and its reads from others."""
    state = step.state
    _read_on(step, worker)
    for reads in state.late_reads.values():
        reads[:] = [read for read in reads if read.neighbour_id != worker.worker_id]
    for other in state.workers.values():
        for batch in other.work.batches:
            for load in batch.loads:
                if load.neighbour_id == worker.worker_id:
                    load.neighbour_id = ""
        if other is not worker and worker.worker_id in other.moves.neighbours:
            del other.moves.neighbours[worker.worker_id]
            step.to_worker(other, DetachNeighbour(worker_id=worker.worker_id, worker_incarnation=worker.incarnation))


def _read_on(step: Step, worker: Worker) -> None:
    """Keep the locks of a lost worker's loads for a while."""
    reads = []
    for load in (load for batch in worker.work.batches for load in batch.loads):
        if load.neighbour_id in step.state.workers:
            reads.append(LateRead(neighbour_id=load.neighbour_id, node=load.node))
        load.neighbour_id = ""
    if reads:
        timer_id = f"reads.{step.seq}"
        step.state.late_reads[step.set_timer(timer_id, "reads", timer_id, LATE_READS_MS)] = reads


def end_late_reads(step: Step, timer_id: str) -> None:
    """Unlock what a lost worker was reading: from now on its messages do not count."""
    for read in step.state.late_reads.pop(timer_id):
        neighbour = step.state.workers[read.neighbour_id]
        unlock_path(step.state, step.state.tree.nodes[read.node], neighbour)
        step.touch(neighbour.worker_id)


def release_neighbour(step: Step, load: Load) -> None:
    """Release a neighbour after a load: it may evict the pages that were read."""
    neighbour = step.state.workers.get(load.neighbour_id)
    if neighbour is not None:
        unlock_path(step.state, step.state.tree.nodes[load.node], neighbour)
        step.touch(neighbour.worker_id)
    load.neighbour_id = ""


def distrust(state: CellState, worker: Worker, neighbour_id: str) -> None:
    """Distrust a neighbour after a failed load: no other load is planned from it as long as both stay."""
    if worker.moves.neighbours.get(neighbour_id):
        worker.moves.neighbours[neighbour_id] = False
        state.count("neighbours_distrusted")


def note_fetched_kv(request: Request, predicted_us: float, disk_us: float, tokens: int) -> None:
    """Note KV fetched for a request; its next load completes the restoration that ``predicted_us`` is of."""
    if predicted_us > 0:
        request.prefetch.kv = FetchedKv(tokens=tokens, predicted_us=predicted_us, disk_us=disk_us)


def note_loads(state: CellState, batch: Batch, message: BatchDone) -> None:
    """Compare predictions of fetched KV with the times observed, now that its loads are over or were not made.

    The observed time is that of the fetch and, after it, the batch's time to load as many tokens.
    """
    for load in batch.loads:
        request = state.requests.get(load.request_id)
        if request is None or request.attempt != load.attempt:
            continue
        fetched, request.prefetch.kv = request.prefetch.kv, None
        if fetched is not None and message.loaded_tokens > 0 and not message.load_failures:
            loading_us = message.load_us * min(1.0, fetched.tokens / message.loaded_tokens)
            state.predictions.note(KV_FROM_DISK, fetched.predicted_us, fetched.disk_us + loading_us)
