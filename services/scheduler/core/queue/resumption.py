"""Requests whose worker is gone, with or before their end: ask the gateway what it has, and start again from there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.hidden.hidden_runs import drop_run
from services.scheduler.core.lifecycle import FAILURE_CODES, RequestEvent, RequestState, next_state
from services.scheduler.core.queue.queueing import accept, enqueue, fail, fault_of
from services.scheduler.core.waiting.waits import withdraw
from shared.errors import AttemptsExhausted
from shared.messages.gateway_notices import ResumeNeeded

if TYPE_CHECKING:
    from services.scheduler.core.request import Request
    from services.scheduler.core.step import Step
    from shared.messages.requests import ReclaimRequest, ResumeRequest

RESUME_TIMEOUT_MS = 30_000
"""A gateway that lives answers within milliseconds; one that does not is found dead by then."""


def worker_gone(step: Step, request: Request) -> None:
    """An admitted request lost its worker and all its pages there."""
    withdraw(step.state, request)
    drop_run(step.state, request)
    request.fetched_kv = request.sparse = None
    request.pages, request.shared, request.node = b"", 0, 0
    request.planned = request.computed = 0
    request.worker_id = ""
    request.failures += 1
    if request.ending:
        fail(step, request, FAILURE_CODES[request.ending])
    elif request.failures >= step.state.config.max_attempts:
        fail(step, request, AttemptsExhausted.code, "the request's workers died too often")
    else:
        request.state = next_state(request.state, RequestEvent.WORKER_LOST)
        request.attempt += 1
        _ask_gateway(step, request)


def _ask_gateway(step: Step, request: Request) -> None:
    timer_id = f"resume.{request.accepted_seq}.{request.attempt}"
    request.resume_timer = step.set_timer(timer_id, "resume", request.request_id, RESUME_TIMEOUT_MS)
    step.state.count("resumes_needed")
    step.to_gateway(request.submit.gateway_id, ResumeNeeded(request_id=request.request_id, attempt=request.attempt))


def reclaim(step: Step, message: ReclaimRequest) -> None:
    """A gateway never heard the end of a request that is over here, because the worker that could tell is gone.

    No bound of the queue applies: the request was accepted once. One that is under way needs nothing, since its worker
    or the loss of that will speak of it; and a gateway that has heard the end meanwhile answers with a cancellation.
    """
    state, submit = step.state, message.submit
    if submit.request_id in state.requests or fault_of(submit):
        state.count("stale_inputs")
        return
    state.count("requests_reclaimed")
    request = accept(step, submit)
    request.state = RequestState.RESUMING
    _ask_gateway(step, request)


def resume(step: Step, request: Request, message: ResumeRequest) -> None:
    """The gateway said which tokens it has; the next attempt repeats none of them and skips none.

    One token at least is left to sample: should it repeat one, the gateway drops it, but it brings the end.
    """
    if request.state is not RequestState.RESUMING or message.attempt != request.attempt:
        step.state.count("stale_inputs")
        return
    step.cancel_timer(request.resume_timer)
    request.resume_timer = ""
    request.state = next_state(request.state, RequestEvent.RESUME)
    most = min(len(message.output) // 4, request.submit.sampling.max_tokens - 1)
    request.output = message.output[: most * 4]
    step.state.count("requests_resumed")
    enqueue(step, request)
