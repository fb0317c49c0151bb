"""Acceptance and order of waiting requests: bounded, by priority and then by arrival."""

from __future__ import annotations

from bisect import insort

from services.scheduler.core.lifecycle import RequestEvent, RequestState, next_state
from services.scheduler.core.placement import place
from services.scheduler.core.state import CellState, Request, count
from services.scheduler.core.turn import Turn
from shared.errors import DeadlineExceeded, DuplicateRequest, InvalidRequest, QueueFull, RequestCancelled
from shared.messages.gateway_notices import RequestFailed
from shared.messages.requests import SubmitRequest

_RETRY_AFTER_MS = 1000
_NAMESPACE_DIGITS = 32
_ENDED_REMEMBERED = 4096

_MESSAGES = {
    RequestCancelled.code: "the request was cancelled",
    DeadlineExceeded.code: "the request's deadline passed",
}


def arrival_order(request: Request) -> tuple[int, int]:
    """Sort key: higher priority first, then earlier arrival. A request keeps its place over all attempts."""
    return (-request.submit.priority, request.accepted_seq)


def submit(turn: Turn, message: SubmitRequest) -> None:
    """Accept a request, or refuse it with a notice."""
    state = turn.state
    known = state.requests.get(message.request_id)
    if known is not None:
        count(state, "duplicate_requests")
        # The same gateway repeats itself: a notice would end the original, which is well.
        if known.submit.gateway_id != message.gateway_id:
            _refuse(turn, message, DuplicateRequest.code, "a request of this id is running already")
        return
    fault = _fault(message)
    if fault:
        _refuse(turn, message, InvalidRequest.code, fault)
        return
    config = state.config
    if state.queued >= config.max_queued or state.queued_tokens + message.prompt_tokens > config.max_queued_tokens:
        _refuse(turn, message, QueueFull.code, "the queue is full", _RETRY_AFTER_MS)
        return
    # An id that comes again goes on counting, so that late events of its earlier life are told apart.
    attempt = state.ended.pop(message.request_id, 0) + 1
    request = Request(submit=message, accepted_seq=turn.seq, accepted_ns=turn.time_ns, attempt=attempt)
    state.requests[message.request_id] = request
    count(state, "requests_accepted")
    if message.deadline_ms > 0:
        timer_id = f"deadline.{turn.seq}"
        request.deadline_timer = turn.set_timer(timer_id, "deadline", message.request_id, message.deadline_ms)
    enqueue(turn, request)


def _fault(message: SubmitRequest) -> str:
    """Why a message can be no request, or ""."""
    if not message.prompt or len(message.prompt) % 4:
        return "the prompt must hold at least one packed int32 token"
    if message.sampling.max_tokens < 1:
        return "max_tokens must be at least 1"
    digits = message.namespace
    if len(digits) != _NAMESPACE_DIGITS or any(digit not in "0123456789abcdef" for digit in digits):
        return "the namespace must be a digest of 32 hex digits"
    return ""


def _refuse(turn: Turn, message: SubmitRequest, code: str, text: str, retry_after_ms: int = 0) -> None:
    count(turn.state, f"refused_{code}")
    word = RequestFailed(request_id=message.request_id, code=code, message=text, retry_after_ms=retry_after_ms)
    turn.to_gateway(message.gateway_id, word)


def enqueue(turn: Turn, request: Request) -> None:
    """Put a WAITING request into the queue of the worker that suits it best."""
    state = turn.state
    state.queued += 1
    state.queued_tokens += request.token_count
    placement = place(state, request)
    if placement is None and state.workers:
        dequeue(state, request)
        fail(turn, request, "context_length_exceeded", "prompt and answer do not fit any worker's context and pool")
        return
    if placement is None:
        request.worker_id, request.cost = "", 0
        queue = state.unplaced
    else:
        worker, cost = placement
        request.worker_id, request.cost = worker.worker_id, cost
        worker.queued_cost += cost
        queue = worker.queue
    insort(queue, request.request_id, key=lambda name: arrival_order(state.requests[name]))


def dequeue(state: CellState, request: Request) -> None:
    """Take a WAITING request out of whatever queue it is in."""
    state.queued -= 1
    state.queued_tokens -= request.token_count
    worker = state.workers.get(request.worker_id)
    queue = state.unplaced if worker is None else worker.queue
    if request.request_id in queue:
        queue.remove(request.request_id)
        if worker is not None:
            worker.queued_cost -= request.cost
    request.worker_id, request.cost = "", 0


def replace_waiting(turn: Turn) -> None:
    """Place every waiting request anew, after a worker joined or left."""
    state = turn.state
    waiting = [request for request in state.requests.values() if request.state is RequestState.WAITING]
    waiting.sort(key=arrival_order)
    for request in waiting:
        dequeue(state, request)
    for request in waiting:
        enqueue(turn, request)


def fail(turn: Turn, request: Request, code: str, text: str = "") -> None:
    """End a request that is in no queue and owns no pages, and say so to its gateway."""
    count(turn.state, f"failed_{code}")
    word = RequestFailed(request_id=request.request_id, code=code, message=text or _MESSAGES.get(code, code))
    turn.to_gateway(request.submit.gateway_id, word)
    forget(turn, request, RequestEvent.DROP)


def forget(turn: Turn, request: Request, event: RequestEvent) -> None:
    """Remove a request that is over from the state, with its timers."""
    request.state = next_state(request.state, event)
    turn.cancel_timer(request.deadline_timer)
    turn.cancel_timer(request.resume_timer)
    state = turn.state
    del state.requests[request.request_id]
    state.ended[request.request_id] = request.attempt
    if len(state.ended) > _ENDED_REMEMBERED:
        del state.ended[next(iter(state.ended))]
