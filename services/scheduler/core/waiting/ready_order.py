"""Where a waiting request stands in its worker's ready order, and which of those in it begin alike.

The second is an index by the first page of tokens, so that a batch that has begun to load a prefix finds the requests
that stand on it without looking at everybody in line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.prefix_tree import TOKEN_BYTES
from services.scheduler.core.waiting import fair_share

if TYPE_CHECKING:
    from collections.abc import Iterable

    from services.scheduler.core.request import Request
    from services.scheduler.core.state import CellState, Worker
    from services.scheduler.core.waiting.fair_share import Entry


def stand_in_line(worker: Worker, request: Request) -> None:
    """Put a waiting request where its priority, its tenant's share and its arrival say."""
    fair_share.add(worker.queue, request.submit.priority, request.lane, _entry(request))
    opening = _opening(worker, request)
    alike = worker.openings.get(opening)
    if alike is not None:
        alike[request.request_id] = None
    elif opening:
        worker.openings[opening] = {request.request_id: None}


def step_out(worker: Worker, request: Request) -> None:
    """Take a waiting request that is ready out of the order."""
    fair_share.remove(worker.queue, request.submit.priority, request.lane, _entry(request))
    opening = _opening(worker, request)
    if opening:
        alike = worker.openings[opening]
        del alike[request.request_id]
        if not alike:
            del worker.openings[opening]


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


def opened_by(worker: Worker, first_pages: Iterable[bytes]) -> dict[str, None]:
    """The ready requests whose tokens begin with one of these pages. In no order; does not mutate."""
    found: dict[str, None] = {}
    for page in first_pages:
        found |= worker.openings.get(page, {})
    return found


def waiting_at(worker: Worker) -> list[str]:
    """Every request that waits at a worker, deferred ones first. Does not mutate."""
    names = list(worker.deferred)
    for level in worker.queue.levels.values():
        for lane in level.lanes.values():
            names += [entry[2] for entry in lane.waiting]
    return names


def _opening(worker: Worker, request: Request) -> bytes:
    """The first page of a request's tokens; b"" where it has none or reuses nothing. The same while it waits."""
    if not request.may_reuse:
        return b""
    size = worker.handle.geometry.page_size * TOKEN_BYTES
    prompt = request.submit.prompt
    first = prompt[:size] if len(prompt) >= size else request.tokens[:size]
    return first if len(first) == size else b""


def _entry(request: Request) -> Entry:
    return (0 if request.is_returned else 1, request.accepted_seq, request.request_id)
