"""Decode room: a running request gets pages some at a time; when a pool is short, the latest arrival yields.

Leases grow with the answer, so that a long one asks a few times and not every few steps. Pages of a lease that the
answer does not use are lost to the cache meanwhile, so leases grow only where most of the pool serves no running
request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.prefix_tree import PAGE_NUMBER_BYTES
from services.scheduler.core.hidden.hidden_leases import more_hidden_pages
from services.scheduler.core.lifecycle import RequestEvent, RequestState, next_state
from services.scheduler.core.queue.admission import decode_room
from services.scheduler.core.request import LeaseWait, Request
from services.scheduler.core.tiers.making_room import make_room
from services.scheduler.core.waiting.waits import withdraw
from shared.messages.worker_plans import ExtendLease, PreemptRequest

if TYPE_CHECKING:
    from services.scheduler.core.state import CellState, Worker
    from services.scheduler.core.step import Step


def request_lease(step: Step, worker: Worker, request: Request, generated: int) -> None:
    """Note that a request needs pages after ``generated`` output tokens; they are granted when the step ends."""
    state = step.state
    if request.state not in (RequestState.PREFILLING, RequestState.DECODING):
        return  # It is about to stop.
    waiting = any(wait.request_id == request.request_id for wait in worker.lease_waits)
    if waiting or generated < request.lease_generated:
        state.count("stale_inputs")
        return
    held = len(request.pages) // PAGE_NUMBER_BYTES
    known = request.submit.prompt_tokens + generated
    wanted = request.pages_for(known + decode_room(state, worker, generated), state.tree.page_size)
    most = request.pages_for(request.max_tokens_total, state.tree.page_size)
    # A worker that asks gets at least a page, however early it asks: it will not ask again before it has used it.
    missing = min(max(wanted, held + 1), most) - held
    if missing > 0:
        worker.lease_waits.append(LeaseWait(request.request_id, generated, missing))


def serve_leases(step: Step, worker: Worker) -> None:
    """Grant waiting leases, earliest arrival first; where pages are short, preempt the latest arrival."""
    state = step.state
    waits = sorted(worker.lease_waits, key=lambda wait: state.requests[wait.request_id].arrival_order)
    for wait in waits:
        request = state.requests[wait.request_id]
        if not worker.pool.can_free(wait.pages):
            wait.pages = min(wait.pages, _least_pages(state))
        if not worker.pool.can_free(wait.pages):
            _preempt_latest(step, worker)
            return
        if not make_room(step, worker, wait.pages, state.tree.owner_of(request.submit.namespace)):
            return  # Backups in flight will free these pages.
        pages = worker.pool.allocate(wait.pages)
        if pages is None:
            return
        request.pages += pages
        request.lease_generated = wait.generated
        worker.lease_waits.remove(wait)
        state.count("leases_extended")
        order = ExtendLease(
            request_id=request.request_id,
            attempt=request.attempt,
            pages=pages,
            hidden_pages=more_hidden_pages(step, request, wait.pages),
        )
        step.to_worker(worker, order)


def _least_pages(state: CellState) -> int:
    """Return the number of pages of the least lease."""
    return -(-state.config.lease_tokens // state.tree.page_size)


def _preempt_latest(step: Step, worker: Worker) -> None:
    """Preempt the running request that arrived last, unless pages are about to be freed anyway."""
    state = step.state
    running = [state.requests[name] for name in worker.work.running]
    if any(request.state in (RequestState.PREEMPTING, RequestState.ABORTING) for request in running):
        return
    if worker.moves.promotion is not None:
        return  # Its pages can be evicted as soon as it is answered.
    if len(running) < 2:
        return  # Alone it fits; it waits for a load or backup of another request, which will end.
    state.count("preemptions")
    preempt(step, worker, max(running, key=lambda request: request.arrival_order))


def preempt(step: Step, worker: Worker, request: Request) -> None:
    """Order a running request to stop; it is queued again after the answer."""
    request.state = next_state(request.state, RequestEvent.PREEMPT)
    withdraw(step.state, request)
    drop_lease_wait(worker, request.request_id)
    step.to_worker(worker, PreemptRequest(request_id=request.request_id, attempt=request.attempt))


def drop_lease_wait(worker: Worker, request_id: str) -> None:
    """Forget that a request waits for pages."""
    worker.lease_waits = [wait for wait in worker.lease_waits if wait.request_id != request_id]
