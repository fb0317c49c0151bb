"""Neighbours: workers of one node, each of which may copy pages from the others' devices instead of computing them.

A worker is told whose pools to map as workers of its node come and go. A load from a neighbour reads its device as a
load from a host pool reads host memory: the path that it reads is locked there until the batch that carries the load
is answered. Where such a load failed, no other is planned between the two before one of them joins anew: nothing
vouches for pages on a device but the map of it.

A worker that was given up may only have stood still, and read on when it goes on. What it says then counts at a gateway
until that has heard of the request's next attempt. So what it was reading stays locked for as long as that may take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.residency import unlock_path
from services.scheduler.core.tiers.under_way import LateRead, Load
from shared.messages.worker_plans import AttachNeighbour, DetachNeighbour

if TYPE_CHECKING:
    from services.scheduler.core.state import CellState, Worker
    from services.scheduler.core.step import Step

LATE_READS_MS = 30_000
"""A gateway that can hear of tokens looks for notices that it missed every ten seconds."""


def attach_neighbours(step: Step) -> None:
    """Tell workers of a node about one another, as far as they were not told yet and it is switched on.

    One that drains loads nothing more, and once it may leave, nobody begins to read from it.
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
                if other is not worker and other.worker_id not in worker.neighbours:
                    _attach(step, worker, other)


def _attach(step: Step, worker: Worker, other: Worker) -> None:
    worker.neighbours[other.worker_id] = True
    step.to_worker(
        worker,
        AttachNeighbour(worker_id=other.worker_id, worker_incarnation=other.incarnation, handle=other.handle),
    )


def detach_neighbour(step: Step, worker: Worker) -> None:
    """A worker is gone, and with it what others were reading from it and what it read from others."""
    state = step.state
    _read_on(step, worker)
    for reads in state.late_reads.values():
        reads[:] = [read for read in reads if read.neighbour_id != worker.worker_id]
    for other in state.workers.values():
        for batch in other.batches:
            for load in batch.loads:
                if load.neighbour_id == worker.worker_id:
                    load.neighbour_id = ""
        if other is not worker and worker.worker_id in other.neighbours:
            del other.neighbours[worker.worker_id]
            step.to_worker(other, DetachNeighbour(worker_id=worker.worker_id, worker_incarnation=worker.incarnation))


def _read_on(step: Step, worker: Worker) -> None:
    """The locks of a worker's loads outlive it for a while."""
    reads = []
    for load in (load for batch in worker.batches for load in batch.loads):
        if load.neighbour_id in step.state.workers:
            reads.append(LateRead(neighbour_id=load.neighbour_id, node=load.node))
        load.neighbour_id = ""
    if reads:
        timer_id = f"reads.{step.seq}"
        step.state.late_reads[step.set_timer(timer_id, "reads", timer_id, LATE_READS_MS)] = reads


def end_late_reads(step: Step, timer_id: str) -> None:
    """Whatever a worker that was given up says from now on, nobody listens."""
    for read in step.state.late_reads.pop(timer_id):
        neighbour = step.state.workers[read.neighbour_id]
        unlock_path(step.state, step.state.tree.nodes[read.node], neighbour)
        step.touch(neighbour.worker_id)


def release_neighbour(step: Step, load: Load) -> None:
    """A load is over: its neighbour may evict what it read."""
    neighbour = step.state.workers.get(load.neighbour_id)
    if neighbour is not None:
        unlock_path(step.state, step.state.tree.nodes[load.node], neighbour)
        step.touch(neighbour.worker_id)
    load.neighbour_id = ""


def distrust(state: CellState, worker: Worker, neighbour_id: str) -> None:
    """A load from this neighbour failed: no other is planned as long as both stay."""
    if worker.neighbours.get(neighbour_id):
        worker.neighbours[neighbour_id] = False
        state.count("neighbours_distrusted")
