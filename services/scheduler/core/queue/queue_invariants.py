"""Invariants of queues, deferrals and transient nodes between steps, checked from scratch. For tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.prefix_tree import ancestors
from services.scheduler.core.lifecycle import RequestState, WaitKind
from services.scheduler.core.require import require
from services.scheduler.core.waiting.fair_share import waiting_at
from services.scheduler.core.waiting.waits import REASONS

if TYPE_CHECKING:
    from services.scheduler.core.request import Request
    from services.scheduler.core.state import CellState, Worker
    from services.scheduler.core.waiting.fair_share import Queue


def check_queues(state: CellState) -> None:
    """Raise InvariantViolated if queues, deferrals or transient nodes contradict one another."""
    for worker in state.workers.values():
        _check_ready_order(worker.line.queue, worker.worker_id)
        _check_worker(state, worker)
    _check_tenants(state)
    _check_waiters(state)
    _check_transient(state)


def _check_ready_order(queue: Queue, name: str) -> None:
    """Raise InvariantViolated if lanes and their order disagree, or an empty lane is kept."""
    size = 0
    for level in queue.levels.values():
        require(bool(level.lanes), f"{name} keeps a priority without requests")
        order = []
        for tenant, lane in level.lanes.items():
            require(bool(lane.waiting), f"{name} keeps an empty lane")
            require(lane.waiting == sorted(lane.waiting), f"a lane of {name} is out of order")
            require(tenant not in level.idle, f"tenant {tenant!r} waits and is idle")
            order.append((lane.tag, *lane.waiting[0][:2], tenant))
            size += len(lane.waiting)
        require(level.order == sorted(order), f"the lanes of {name} are out of order")
    require(queue.size == size, f"{name} miscounts its ready requests")


def _check_worker(state: CellState, worker: Worker) -> None:
    name = worker.worker_id
    waiting = [state.requests[request_id] for request_id in waiting_at(worker)]
    require(all(request.state is RequestState.WAITING for request in waiting), f"{name} queues what does not wait")
    require(worker.line.cost == sum(request.place.cost for request in waiting), f"{name} miscounts its queue")
    alike = {page: dict.fromkeys(sorted(names)) for page, names in worker.line.openings.items()}
    require(alike == _openings(state, worker), f"{name} does not know how its ready requests begin")
    running = [state.requests[request_id] for request_id in worker.work.running]
    unplanned = sum(request.token_count - request.planned for request in running)
    require(worker.work.unplanned == unplanned, f"{name} miscounts what it has not planned")
    require(
        worker.work.outstanding == sum(batch.tokens for batch in worker.work.batches), f"{name} miscounts its batches"
    )
    for batch in worker.work.batches:
        tokens = sum(chunk.end - chunk.start for chunk in batch.chunks)
        require(batch.tokens == tokens, f"a batch of {name} miscounts its tokens")
    for node_id, names in worker.line.load_waiters.items():
        require(bool(names), f"no request waits for node {node_id}")
        waits = all(state.requests[request_id].wait.node == node_id for request_id in names)
        require(waits, f"{name} keeps a request that does not wait for node {node_id}")


def _openings(state: CellState, worker: Worker) -> dict[bytes, dict[str, None]]:
    """Return the correct value of ``Worker.openings``, in order of the ids."""
    size = state.tree.page_token_bytes
    found: dict[bytes, dict[str, None]] = {}
    for name in sorted(waiting_at(worker)):
        request = state.requests[name]
        first = request.tokens[:size]
        if name not in worker.line.deferred and request.may_reuse and len(first) == size:
            found.setdefault(first, {})[name] = None
    return found


def _check_tenants(state: CellState) -> None:
    tenants: dict[str, int] = {}
    for request in state.requests.values():
        if request.state is RequestState.WAITING:
            tenants[request.submit.tenant] = tenants.get(request.submit.tenant, 0) + 1
    require(tenants == state.tenants, "the waiting requests of tenants are miscounted")


def _check_waiters(state: CellState) -> None:
    """Raise InvariantViolated unless deferred requests wait for a ready producer, or a load, at their own worker."""
    for producer_id, names in state.waiters.items():
        require(bool(names), f"no request waits for {producer_id}")
        producer = state.requests.get(producer_id)
        require(producer is not None and bool(producer.place.marks), f"{producer_id} will bring nothing")
        for name in names:
            request = state.requests[name]
            require(request.wait.producer == producer_id, f"{name} does not wait for {producer_id}")
            is_near = producer is not None and producer.worker_id == request.worker_id
            require(is_near, f"{name} waits for {producer_id} at another worker")
    for request in state.requests.values():
        _check_deferral(state, request)


def _check_deferral(state: CellState, request: Request) -> None:
    name = request.request_id
    is_queued = request.state is RequestState.WAITING and bool(request.worker_id)
    is_nowhere = request.wait.kind is WaitKind.NOWHERE
    require(is_queued != is_nowhere, f"{name} waits for {request.wait.kind.value} while {request.state.value}")
    if request.state is not RequestState.WAITING:
        require(not request.patience.timer, f"{name} does not wait and has a deadline for that")
    worker = state.workers.get(request.worker_id)
    is_out = worker is not None and name in worker.line.deferred
    require(is_out == request.wait.is_deferred, f"{name} is deferred only in part")
    if not request.wait.is_deferred or worker is None:
        return
    require(not request.patience.is_over, f"{name} is deferred past its deadline")
    reason = REASONS[request.wait.kind]
    has_deadline = request.patience.timer in state.timers
    require(has_deadline or not reason.has_deadline, f"{name} is deferred without a deadline")
    require(
        reason.is_known(state, worker, request),
        f"{request.wait.kind.value} knows nothing of {name}, which waits for it",
    )


def _check_transient(state: CellState) -> None:
    """Raise InvariantViolated unless each mark has a producer that is about to compute, and marks, its whole path."""
    tree = state.transient.tree
    expected: dict[int, dict[str, list[str]]] = {}
    for request in state.requests.values():
        if not request.place.marks:
            continue
        name = request.request_id
        is_coming = request.state is RequestState.PREFILLING or (
            request.state is RequestState.WAITING and bool(request.worker_id) and not request.wait.is_deferred
        )
        require(is_coming, f"{name} marks what it will not compute")
        path = ancestors(tree, tree.nodes[request.place.marks])
        tokens = b"".join(node.tokens for node in reversed(path))
        require(request.tokens.startswith(tokens), f"{name} marks other tokens than its own")
        require(len(request.tokens) - len(tokens) < tree.page_token_bytes, f"{name} marks only a part of its tokens")
        for node in path:
            expected.setdefault(node.id, {}).setdefault(request.worker_id, []).append(name)
    found = {
        node_id: {worker_id: sorted(names) for worker_id, names in marks.items()}
        for node_id, marks in state.transient.marks.items()
    }
    wanted = {
        node_id: {worker_id: sorted(names) for worker_id, names in marks.items()} for node_id, marks in expected.items()
    }
    require(found == wanted, "the marks of transient nodes and their producers disagree")
    require(len(tree.nodes) == len(found) + len(tree.roots), "a transient node has no mark")
