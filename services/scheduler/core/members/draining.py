"""Draining: a worker that was asked to end gets nothing new, finishes its requests, and hands over hot nodes.

Its waiting requests are placed again at once. Running requests go on for most of the grace; those not done by then are
preempted, keep their tokens, and start again elsewhere. Meanwhile :mod:`handover` copies nodes that no other has. When
nothing is left, or when the grace is over, the worker is told that it may go. From then on no neighbour reads its
device, and its requests that still run go on as after a loss. The last worker of a node leaves host memory that no
worker is left to use: its hottest nodes are handed on to other nodes, and no worker waits for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.lifecycle import RequestState
from services.scheduler.core.members.drain import Drain, DrainEvent, DrainState
from services.scheduler.core.members.handover import begin_handing_on, hand_over, is_handing_over, rank_by_worth
from services.scheduler.core.queue.leases import preempt
from services.scheduler.core.queue.queueing import enqueue, take_waiting
from shared.messages.worker_plans import LeaveCell

if TYPE_CHECKING:
    from services.scheduler.core.state import CellState, Worker
    from services.scheduler.core.step import Step
    from shared.messages.worker_events import WorkerDraining

_RUNNING_SHARE = 4 / 5
"""Share of the grace in which running requests go on. The rest is for handing over their KV."""

MOST_GRACE_MS = 24 * 3_600_000


def begin_drain(step: Step, worker: Worker, message: WorkerDraining) -> None:
    """Begin the drain of a worker that was asked to end. A repeated message changes nothing."""
    state = step.state
    if worker.drain is not None:
        state.count("stale_inputs")
        return
    grace_ms = min(max(0, message.grace_ms), MOST_GRACE_MS)
    timer_id = f"drain.{worker.worker_id}.{worker.incarnation}"
    step.set_timer(timer_id, "drain", worker.worker_id, int(grace_ms * _RUNNING_SHARE))
    worker.drain = Drain(ends_ns=step.time_ns + grace_ms * 1_000_000, timer_id=timer_id)
    state.count("drains_started")
    worker.moves.is_promotion_due = False
    for request in take_waiting(state, worker):
        enqueue(step, request)
    if worker.work.running:
        worker.drain.nodes = rank_by_worth(state, worker)
    storage = state.storage_of(worker)
    is_last = all(other.drain is not None for other in state.workers.values() if other.node == worker.node)
    if storage is not None and storage.shares and is_last:
        begin_handing_on(step, storage, grace_ms, is_storage_leaving=False)


def go_on_draining(step: Step, worker: Worker) -> bool:
    """Hand over more nodes, and let the worker go when nothing is left; return whether there was much to do."""
    drain = worker.drain
    if drain is None or drain.is_over:
        return False
    if not worker.work.running and not drain.is_ranked_last:
        drain.nodes, drain.is_ranked_last = rank_by_worth(step.state, worker), True
    is_busy = hand_over(step, worker, drain)
    if not drain.nodes and not worker.work.running and not _is_in_use(step.state, worker):
        step.state.count("drains_done")
        _let_go(step, worker, drain, DrainEvent.EMPTIED)
    return is_busy


def expire_drain(step: Step, worker: Worker) -> None:
    """Expire a part of the grace: first the part for running requests, then all of it."""
    drain = worker.drain
    if drain is None or drain.is_over:
        return
    if drain.state is DrainState.CLEARING:
        step.state.count("drains_cut_short")
        _let_go(step, worker, drain, DrainEvent.TIME_UP)
        return
    drain.advance(DrainEvent.TIME_SHORT)
    drain.timer_id += ".end"
    left_ms = max(0, drain.ends_ns - step.time_ns) // 1_000_000
    step.set_timer(drain.timer_id, "drain", worker.worker_id, left_ms)
    for name in list(worker.work.running):
        request = step.state.requests[name]
        if request.state in (RequestState.PREFILLING, RequestState.DECODING):
            step.state.count("requests_moved_by_drains")
            preempt(step, worker, request)


def _is_in_use(state: CellState, worker: Worker) -> bool:
    """Return whether this worker's device is being written, or read by an order whose deadline has not passed."""
    if worker.work.batches or worker.moves.promotion is not None or is_handing_over(state, worker):
        return True
    name = worker.worker_id
    return any(
        load.neighbour_id == name
        for other in state.workers.values()
        for batch in other.work.batches
        for load in batch.loads
    )


def _let_go(step: Step, worker: Worker, drain: Drain, event: DrainEvent) -> None:
    """Tell the worker that it may leave. From now on, pages read from its device could vanish under the reader."""
    step.cancel_timer(drain.timer_id)
    drain.advance(event)
    drain.nodes = []
    for other in step.state.workers.values():
        if worker.worker_id in other.moves.neighbours:
            other.moves.neighbours[worker.worker_id] = False
    step.to_worker(worker, LeaveCell())
