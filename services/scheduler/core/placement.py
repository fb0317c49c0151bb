"""Which worker a waiting request goes to: the one where its prefill is estimated to be done first."""

from __future__ import annotations

from services.scheduler.core.reach import matched_path, reach
from services.scheduler.core.state import CellState, Request, Worker

# All costs are in quarters of the time that computing one prefill token takes.
_COMPUTED_TOKEN = 4
_LOADED_TOKEN = 1  # A load moves a token several times faster than prefill computes it.
_RUNNING_REQUEST = 32  # Each step also carries a token of every decoding request.


def fits(state: CellState, request: Request, worker: Worker) -> bool:
    """Whether the request, alone on this worker, can run to its last token."""
    tokens = request.max_tokens_total
    return tokens <= worker.max_context and -(-tokens // state.tree.page_size) <= worker.pool.total


def place(state: CellState, request: Request) -> tuple[Worker, int] | None:
    """The best worker and the request's cost there, or None when it fits nowhere. Ties: first joined."""
    path = matched_path(state, request)
    best: tuple[int, Worker, int] | None = None
    for worker in state.workers.values():
        if not fits(state, request, worker):
            continue
        found = reach(state, path, worker)
        page_size = state.tree.page_size
        computed = request.token_count - (found.device_pages + found.host_pages) * page_size
        cost = computed * _COMPUTED_TOKEN + found.host_pages * page_size * _LOADED_TOKEN
        total = cost + backlog(state, worker)
        if best is None or total < best[0]:
            best = (total, worker, cost)
    return None if best is None else (best[1], best[2])


def backlog(state: CellState, worker: Worker) -> int:
    """The cost of what this worker has to do before a request that joins its queue now. Does not mutate."""
    prefill = 0
    for name in worker.running:
        request = state.requests[name]
        prefill += max(0, request.token_count - request.planned)
    return worker.queued_cost + prefill * _COMPUTED_TOKEN + len(worker.running) * _RUNNING_REQUEST
