"""Where a waiting request stands in its worker's ready order."""

from __future__ import annotations

from services.scheduler.core import fair_share
from services.scheduler.core.fair_share import Entry
from services.scheduler.core.state import CellState, Request, Worker


def stand_in_line(worker: Worker, request: Request) -> None:
    """Put a waiting request where its priority, its tenant's share and its arrival say."""
    fair_share.add(worker.queue, request.submit.priority, request.lane, _entry(request))


def step_out(worker: Worker, request: Request) -> None:
    """Take a waiting request that is ready out of the order."""
    fair_share.remove(worker.queue, request.submit.priority, request.lane, _entry(request))


def serve(worker: Worker, request: Request, tokens: int) -> None:
    """Take a request out of the order because it is admitted, and charge its tenant what it will compute."""
    fair_share.charge(worker.queue, request.submit.priority, request.lane, tokens, is_start=True)
    step_out(worker, request)


def charge_output(worker: Worker, request: Request, tokens: int) -> None:
    """Charge a tenant the output of a request that leaves its worker."""
    fair_share.charge(worker.queue, request.submit.priority, request.lane, tokens, is_start=False)


def first_in_line(state: CellState, worker: Worker, limit: int) -> list[str]:
    """The requests that would be served next, at most ``limit``. Does not mutate."""
    requests = state.requests
    return fair_share.window(worker.queue, limit, lambda name: requests[name].uncached)


def waiting_at(worker: Worker) -> list[str]:
    """Every request that waits at a worker, deferred ones first. Does not mutate."""
    names = list(worker.deferred)
    for level in worker.queue.levels.values():
        for lane in level.lanes.values():
            names += [entry[2] for entry in lane.waiting]
    return names


def _entry(request: Request) -> Entry:
    return (0 if request.is_returned else 1, request.accepted_seq, request.request_id)
