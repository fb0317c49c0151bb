"""Ends that come from outside: the caller gave up, its gateway died, a deadline passed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.lifecycle import FAILURE_CODES, RequestEvent, RequestState, next_state
from services.scheduler.core.queue.leases import drop_lease_wait
from services.scheduler.core.queue.queueing import dequeue, fail
from services.scheduler.core.waiting.waits import withdraw
from shared.messages.worker_plans import AbortRequest

if TYPE_CHECKING:
    from services.scheduler.core.request import Request
    from services.scheduler.core.step import Step


def end_early(step: Step, request: Request, reason: str) -> None:
    """End a request with finish reason ``reason`` (``cancelled`` or ``deadline``), wherever it is.

    What runs is aborted by its worker, which answers RequestFinished; until then its pages are in use.
    """
    state = step.state
    step.touch(request.worker_id)
    if request.state is RequestState.WAITING:
        dequeue(state, request)
        fail(step, request, FAILURE_CODES[reason])
    elif request.state is RequestState.RESUMING:
        fail(step, request, FAILURE_CODES[reason])
    elif request.state is RequestState.PREEMPTING:
        request.ending = request.ending or reason
    elif request.state is not RequestState.ABORTING:
        worker = state.workers[request.worker_id]
        request.state = next_state(request.state, RequestEvent.ABORT)
        request.ending = reason
        withdraw(state, request)
        drop_lease_wait(worker, request.request_id)
        step.to_worker(worker, AbortRequest(request_id=request.request_id, attempt=request.attempt, reason=reason))


def cancel_gateway(step: Step, gateway_id: str) -> None:
    """Cancel every request of a gateway that is gone."""
    for request in list(step.state.requests.values()):
        if request.submit.gateway_id == gateway_id:
            end_early(step, request, "cancelled")
