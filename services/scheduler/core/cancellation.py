"""Ends that come from outside: the caller gave up, its gateway died, a deadline passed."""

from __future__ import annotations

from services.scheduler.core.completion import FAILURE_CODES
from services.scheduler.core.deferral import withdraw
from services.scheduler.core.leases import drop_lease_wait
from services.scheduler.core.lifecycle import RequestEvent, RequestState, next_state
from services.scheduler.core.queueing import dequeue, fail
from services.scheduler.core.state import Request
from services.scheduler.core.turn import Turn
from shared.messages.worker_plans import AbortRequest


def end_early(turn: Turn, request: Request, reason: str) -> None:
    """End a request with finish reason ``reason`` (``cancelled`` or ``deadline``), wherever it is.

    What runs is aborted by its worker, which answers RequestFinished; until then its pages are in use.
    """
    state = turn.state
    turn.touch(request.worker_id)
    if request.state is RequestState.WAITING:
        dequeue(state, request)
        fail(turn, request, FAILURE_CODES[reason])
    elif request.state is RequestState.RESUMING:
        fail(turn, request, FAILURE_CODES[reason])
    elif request.state is RequestState.PREEMPTING:
        request.ending = request.ending or reason
    elif request.state is not RequestState.ABORTING:
        worker = state.workers[request.worker_id]
        request.state = next_state(request.state, RequestEvent.ABORT)
        request.ending = reason
        withdraw(state, request)
        drop_lease_wait(worker, request.request_id)
        turn.to_worker(worker, AbortRequest(request_id=request.request_id, attempt=request.attempt, reason=reason))


def cancel_gateway(turn: Turn, gateway_id: str) -> None:
    """Cancel every request of a gateway that is gone."""
    for request in list(turn.state.requests.values()):
        if request.submit.gateway_id == gateway_id:
            end_early(turn, request, "cancelled")
