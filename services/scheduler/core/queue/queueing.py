"""Acceptance of requests within hard bounds, and the queues that they wait in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from services.scheduler.core.adapters import adapter_left, fault_everywhere, is_served
from services.scheduler.core.cache.prefix_match import matched_path
from services.scheduler.core.cache.prompt_blocks import PromptBlocks, blocks_behind, find_base, prompt_behind
from services.scheduler.core.hidden.hidden_runs import drop_run
from services.scheduler.core.lifecycle import RequestEvent, RequestState, WaitEvent, next_state
from services.scheduler.core.queue.placement import Placement, estimate, fits, place, takes_requests
from services.scheduler.core.quotas.quota_owners import remember_quota
from services.scheduler.core.rates import backlog_us
from services.scheduler.core.request import PromptMatch, Request
from services.scheduler.core.restoring.prefetch import prefetch, prefetch_when_near
from services.scheduler.core.tiers.saves import remember_key
from services.scheduler.core.tiers.under_way import StoreLacks
from services.scheduler.core.waiting.fair_share import first_in_line, stand_in_line, step_out, waiting_at
from services.scheduler.core.waiting.transient import tokens_coming
from services.scheduler.core.waiting.waits import (
    count_waiting,
    end_deferral,
    forget_deferral,
    forget_fetch_waits,
    let_go_of_fetch,
    withdraw,
)
from shared.compact_messages import whole_request
from shared.errors import (
    CodecError,
    DeadlineExceeded,
    DuplicateRequest,
    InvalidRequest,
    QueueFull,
    RequestCancelled,
    Unavailable,
)
from shared.ids import DIGEST_BYTES, TOKEN_BYTES, is_digest
from shared.messages.gateway_notices import CELLS_BOUND_OF_TENANTS, TENANTS_BOUND, PromptWanted, RequestFailed
from shared.messages.requests import CacheHints, SubmitRequest
from shared.prompt_chain import block_digests

if TYPE_CHECKING:
    from services.scheduler.core.cache.prefix_tree import Node
    from services.scheduler.core.state import CellState, Worker
    from services.scheduler.core.step import Step
    from shared.messages.requests import PromptBase

_RETRY_AFTER_MS = 1000

MODEL_NOT_FOUND = "model_not_found"
"""OpenAI's error code for a model, here an adapter, that is not served."""

_ENDED_REMEMBERED = 4096
_NO_CACHE = CacheHints(read=False, write=False)

_MESSAGES = {
    RequestCancelled.code: "the request was cancelled",
    DeadlineExceeded.code: "the request's deadline passed",
}


def submit(step: Step, message: SubmitRequest) -> None:
    """Accept a request, refuse it with a notice, or ask for the whole prompt where its base is not known."""
    state = step.state
    known = state.requests.get(message.request_id)
    if known is not None:
        state.count("duplicate_requests")
        # The same gateway repeats itself: a notice would end the original, which is running well.
        if known.submit.gateway_id != message.gateway_id:
            _refuse(step, message, DuplicateRequest.code, "a request of this id is running already")
        return
    fault = ""
    try:
        message = whole_request(message)
    except CodecError as error:
        fault = error.message
    fault = fault or fault_of(message)
    if fault:
        _refuse(step, message, InvalidRequest.code, fault)
        return
    if message.adapter and not is_served(state, message.adapter):
        _refuse(step, message, MODEL_NOT_FOUND, "the adapter that was asked for is not served any more")
        return
    exceeded = _exceeded_bound(state, message)
    if exceeded:
        _refuse(step, message, QueueFull.code, exceeded, _RETRY_AFTER_MS)
        return
    match = unmatched(message)
    if message.base is not None:
        node = find_base(state.blocks, state.tree, message.namespace, message.base)
        if node is None:
            state.count("prompts_wanted")
            step.to_gateway(message.gateway_id, PromptWanted(request_id=message.request_id))
            return
        message, match = _with_prompt(state, message, message.base, node)
    state.count("requests_accepted")
    enqueue(step, accept(step, message, match))


def unmatched(message: SubmitRequest) -> PromptMatch:
    """Return the match of a whole prompt before any look-up: only the names of its blocks."""
    return PromptMatch(blocks=PromptBlocks(block_digests(message.namespace, message.prompt)))


def _with_prompt(
    state: CellState, message: SubmitRequest, base: PromptBase, node: Node
) -> tuple[SubmitRequest, PromptMatch]:
    """Return the message with its whole prompt, which begins on the way to ``node``, and the match so far."""
    state.count("bases_resolved")
    prompt = prompt_behind(state.tree, node, base.tokens, message.tail)
    page_size = state.tree.page_size
    match = PromptMatch(node.id, base.tokens // page_size * page_size, blocks_behind(message, base))
    return msgspec.structs.replace(message, prompt=prompt, base=None, tail=b""), match


def accept(step: Step, message: SubmitRequest, match: PromptMatch) -> Request:
    """Return a request with its whole prompt; it is known from now on, and in no queue yet."""
    state = step.state
    if not state.config.prefix_caching:
        message = msgspec.structs.replace(message, cache=_NO_CACHE)
    # A repeated id continues its count of attempts, so that late events of its earlier life are told apart.
    attempt = state.ended.pop(message.request_id, 0) + 1
    request = Request(submit=message, accepted_seq=step.seq, accepted_ns=step.time_ns, attempt=attempt, match=match)
    state.requests[message.request_id] = request
    if message.adapter:
        state.adapters[message.adapter].requests += 1
    if message.key_id:
        remember_key(state, message)
    if message.quota is not None or state.tree.owners:
        remember_quota(state, message)
    if message.deadline_ms > 0:
        timer_id = f"deadline.{step.seq}"
        request.deadline_timer = step.set_timer(timer_id, "deadline", message.request_id, message.deadline_ms)
    return request


def fault_of(message: SubmitRequest) -> str:
    """Return what is wrong with a request, or ""."""
    base = message.base
    if base is not None and (len(base.digest) != DIGEST_BYTES or base.tokens < 1):
        return "a prompt's base must be of at least one token, and named by a digest of 16 bytes"
    if base is not None and message.prompt:
        return "a request with a base must have its tail in the place of the prompt"
    tokens = message.prompt if base is None else message.tail
    if not tokens or len(tokens) % TOKEN_BYTES:
        return "the prompt must hold at least one packed int32 token"
    if message.sampling.max_tokens < 1:
        return "max_tokens must be at least 1"
    if not is_digest(message.namespace):
        return "the namespace must be a digest of 32 hex digits"
    if message.adapter and message.cache.importance is not None:
        return "prefixes of an adapter are read whole: fidelity must be exact"
    return ""


def _exceeded_bound(state: CellState, message: SubmitRequest) -> str:
    """Return a sentence on the bound of the queue that one more request would exceed, or ""."""
    config = state.config
    if state.queued >= config.max_queued:
        return f"the queue is full: max_queued allows {config.max_queued} waiting requests"
    if state.queued_tokens + message.prompt_tokens > config.max_queued_tokens:
        return f"the queue is full: max_queued_tokens allows {config.max_queued_tokens} tokens of waiting requests"
    waiting = state.tenants.get(message.tenant, 0)
    if message.max_queued:
        return f"{TENANTS_BOUND} {message.max_queued} waiting requests" if waiting >= message.max_queued else ""
    if 0 < config.max_queued_per_tenant <= waiting:
        return f"{CELLS_BOUND_OF_TENANTS} {config.max_queued_per_tenant} waiting requests of one tenant"
    return ""


def _refuse(step: Step, message: SubmitRequest, code: str, text: str, retry_after_ms: int = 0) -> None:
    step.state.count(f"refused_{code}")
    word = RequestFailed(request_id=message.request_id, code=code, message=text, retry_after_ms=retry_after_ms)
    step.to_gateway(message.gateway_id, word)


def enqueue(step: Step, request: Request) -> None:
    """Put a WAITING request into the queue of the worker that suits it best."""
    state = step.state
    placement = place(state, request)
    adapter = request.submit.adapter
    if placement is None and takes_requests(state, adapter):
        fail(step, request, "context_length_exceeded", "prompt and answer do not fit any worker's context and pool")
        return
    if placement is None and adapter and (fault := fault_everywhere(state, adapter)):
        fail(step, request, Unavailable.code, f"no worker could load the adapter: {fault}")
        return
    count_waiting(state, request, 1)
    if placement is None:
        state.unplaced[request.request_id] = request.accepted_seq
    else:
        stand_at(state, request, placement)
        if state.storages or request.prefetch.is_due:
            prefetch_when_near(step, request)
        step.touch(request.worker_id)


def stand_at(state: CellState, request: Request, placement: Placement) -> None:
    """Put a waiting request that is in no queue into this worker's queue."""
    worker = placement.worker
    request.worker_id, place = worker.worker_id, request.place
    place.cost, place.uncached = placement.cost_us, placement.uncached
    place.lane = request.submit.tenant if state.config.fair_share else ""
    worker.line.cost += place.cost
    request.advance_wait(WaitEvent.PLACED)
    stand_in_line(worker, request)


def step_away(state: CellState, request: Request) -> None:
    """Take a waiting request from its worker's queue, with its marks and fetches. It still counts as queued."""
    withdraw(state, request)
    worker = state.workers[request.worker_id]
    if request.wait.is_deferred:
        end_deferral(state, request)
    else:
        step_out(worker, request)
    request.advance_wait(WaitEvent.MOVED)
    let_go_of_fetch(state, request)
    if request.hidden.run is not None:
        drop_run(state, request)
    request.prefetch.kv = request.sparse.choice = None
    worker.line.cost -= request.place.cost
    request.worker_id, request.place.cost, request.place.uncached = "", 0, 0
    request.prefetch.forget_brought()
    request.prefetch.lacks = StoreLacks()


def dequeue(state: CellState, request: Request) -> None:
    """Take a WAITING request out of its worker's queue, or of the requests without a worker."""
    if request.worker_id:
        step_away(state, request)
    else:
        del state.unplaced[request.request_id]
    count_waiting(state, request, -1)


def take_waiting(state: CellState, worker: Worker) -> list[Request]:
    """Take all requests out of a worker's queue; return them in order of arrival, to be placed again."""
    waiting = sorted((state.requests[name] for name in waiting_at(worker)), key=lambda request: request.arrival_order)
    for request in waiting:
        dequeue(state, request)
    return waiting


MOST_REPLACED = 512
"""Waiting requests at most that a join places again: each is weighed at every worker, a tenth of a millisecond."""


def replace_waiting(step: Step) -> None:
    """Place waiting requests again after a worker joined: those without a worker, and those that wait longest.

    The others stay where they are; workers that have nothing left to do take them over (:func:`steal`).
    """
    state = step.state
    waiting = [request for request in state.requests.values() if request.state is RequestState.WAITING]
    waiting.sort(key=lambda request: request.arrival_order)
    placed = [request for request in waiting if request.request_id not in state.unplaced]
    left = dict.fromkeys(request.request_id for request in placed[MOST_REPLACED:])
    waiting = [request for request in waiting if request.request_id not in left]
    for request in waiting:
        dequeue(state, request)
    for request in waiting:
        enqueue(step, request)


def place_unplaced(step: Step, adapter: str) -> None:
    """Place the requests that had no worker because none had loaded this adapter."""
    state = step.state
    for name in list(state.unplaced):
        request = state.requests[name]
        if request.submit.adapter == adapter:
            dequeue(state, request)
            enqueue(step, request)


def fail(step: Step, request: Request, code: str, text: str = "") -> None:
    """End a request that is in no queue and owns no pages, and notify its gateway."""
    step.state.count(f"failed_{code}")
    word = RequestFailed(request_id=request.request_id, code=code, message=text or _MESSAGES.get(code, code))
    step.to_gateway(request.submit.gateway_id, word)
    forget(step, request, RequestEvent.DROP)


def forget(step: Step, request: Request, event: RequestEvent) -> None:
    """Remove a request that is over from the state, with its timers; its last attempt number is remembered."""
    request.state = next_state(request.state, event)
    step.cancel_timer(request.deadline_timer)
    step.cancel_timer(request.resume_timer)
    forget_deferral(step, request)
    forget_fetch_waits(step, request)
    state = step.state
    if state.recollection is not None:
        state.recollection.forget_waiting(request.request_id)
    if request.submit.cache.leases:
        state.cache_leases.take_pending(request.request_id)
    del state.requests[request.request_id]
    if request.submit.adapter:
        adapter_left(step, request.submit.adapter)
    state.ended[request.request_id] = request.attempt
    if len(state.ended) > _ENDED_REMEMBERED:
        del state.ended[next(iter(state.ended))]


_STEALING_AMONG = 16
"""Waiting requests that one theft chooses among, and takes at most."""


def steal(step: Step) -> list[Worker]:
    """Let idle workers take over requests that finish earlier there; return the workers that got any.

    Ends with the first worker that finds nothing to take, so that many idle workers cost no more than one. A later turn
    begins with another of them.
    """
    state = step.state
    idle = [worker for worker in state.workers.values() if _is_idle(worker)]
    first = step.seq % len(idle) if idle else 0
    busy = []
    for worker in (*idle[first:], *idle[:first]):
        if not _steal_for(step, worker):
            break
        busy.append(worker)
    return busy


def _is_idle(worker: Worker) -> bool:
    return not (
        worker.work.running or worker.work.batches or worker.line.queue.size or worker.line.deferred or worker.drain
    )


def _steal_for(step: Step, thief: Worker) -> bool:
    """Move requests from the most loaded queue, those that lose least first, as long as each is done earlier."""
    state = step.state
    victim: Worker | None = None
    most = 0.0
    for worker in state.workers.values():
        backlog = backlog_us(state, worker) if worker.line.queue.size else 0.0
        if backlog > most:
            victim, most = worker, backlog
    if victim is None:
        return False
    taken = 0
    for request, placement in _by_loss(state, victim, thief):
        if placement.cost_us + backlog_us(state, thief) >= backlog_us(state, victim):
            continue
        step_away(state, request)
        stand_at(state, request, placement)
        prefetch(step, request)
        taken += 1
    state.count("requests_stolen", taken)
    return taken > 0


def _by_loss(state: CellState, victim: Worker, thief: Worker) -> list[tuple[Request, Placement]]:
    """Return the next requests of a queue with their cost elsewhere, the least loss first, then in order."""
    found = []
    for name in first_in_line(state, victim, _STEALING_AMONG):
        request = state.requests[name]
        if fits(state, request, thief):
            path = matched_path(state, request)
            coming = tokens_coming(state, request).get(thief.worker_id, 0)
            found.append((request, estimate(state, request, thief, path, coming)))
    return sorted(found, key=lambda pair: pair[1].cost_us - pair[0].place.cost)
