"""Progress and ends of requests: a worker's reports of batches, ends and preemptions, and ends from outside.

An end from outside is a caller that gave up, a gateway that died, or a deadline that passed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.eviction_orders import ended
from services.scheduler.core.cache.insertion import publish_computed, publish_final
from services.scheduler.core.cache.leasing import settle_leases
from services.scheduler.core.hidden.hidden_leases import leave_lease
from services.scheduler.core.hidden.hidden_runs import drop_run
from services.scheduler.core.hidden.restorations import refused, run_went_on
from services.scheduler.core.kept_texts import forget_texts
from services.scheduler.core.lifecycle import ADMITTED, FAILURE_CODES, RequestEvent, RequestState, next_state
from services.scheduler.core.queue.leases import drop_lease_wait, preempt
from services.scheduler.core.queue.queueing import dequeue, enqueue, fail, forget
from services.scheduler.core.rates import observe
from services.scheduler.core.sparse.warming import sparse_loaded, sparse_refused
from services.scheduler.core.tiers.loads import note_loads, settle_loads, settle_loads_of
from services.scheduler.core.tiers.writes import note_end, sequence_computed
from services.scheduler.core.waiting.fair_share import charge_output
from services.scheduler.core.waiting.waits import progressed, withdraw
from shared.errors import AttemptsExhausted
from shared.messages.worker_plans import AbortRequest

if TYPE_CHECKING:
    from services.scheduler.core.request import Request
    from services.scheduler.core.state import Worker
    from services.scheduler.core.step import Step
    from services.scheduler.core.tiers.under_way import Batch, Chunk
    from shared.messages.worker_events import BatchDone, FinishedToo, RequestFinished, RequestPreempted


_TIMES = (
    "compute_us",
    "load_us",
    "bubble_us",
    "stall_us",
    "loaded_tokens",
    "bubble_tokens",
    "restored_tokens",
    "restore_us",
)
"""Fields of a BatchDone that tell where a worker's time went; counters of the same names add them up."""


def batch_done(step: Step, worker: Worker, batch: Batch, message: BatchDone) -> None:
    """Settle a batch: take over loaded and computed pages, and restart requests whose chunks failed."""
    state = step.state
    if batch is not worker.work.batches[0]:
        state.count("batches_in_bubbles")
    worker.work.batches.remove(batch)
    worker.work.outstanding -= batch.tokens
    _measure(step, worker, batch, message)
    if batch.loads:
        note_loads(state, batch, message)
    for report in message.sparse_loaded:
        sparse_loaded(step, worker, report)
    if batch.loads:
        settle_loads(step, worker, batch, message)
    for chunk in batch.chunks:
        request = state.requests.get(chunk.request_id)
        if request is None or request.attempt != chunk.attempt or request.state not in ADMITTED:
            continue
        if chunk.request_id in message.failed:
            _chunk_failed(step, worker, request, message)
        elif not request.is_poisoned:
            _chunk_computed(step, worker, request, chunk)
            if request.hidden.run is not None:
                run_went_on(step, request, chunk, message)
            worker.moves.is_promotion_due = state.config.promotion != "off"


def _measure(step: Step, worker: Worker, batch: Batch, message: BatchDone) -> None:
    """Update the worker's measured speeds, and add up where its time went."""
    observe(step.state, worker, batch, message)
    for name in _TIMES:
        step.state.count(name, max(0, getattr(message, name)))


def _chunk_computed(step: Step, worker: Worker, request: Request, chunk: Chunk) -> None:
    if chunk.start != request.computed:
        return
    request.computed = chunk.end
    publish_computed(step, request, worker)
    if request.computed == request.token_count and request.state is RequestState.PREFILLING:
        request.state = next_state(request.state, RequestEvent.PREFILLED)
        withdraw(step.state, request)
        if step.state.storages:
            end = step.state.tree.nodes[request.node] if request.node else None
            sequence_computed(step, worker, request, request.tokens, request.computed, end)
    else:
        progressed(step.state, request)


def _chunk_failed(step: Step, worker: Worker, request: Request, message: BatchDone) -> None:
    """Start the request again. Chunks sent meanwhile build on the failed one, so a new attempt fences them off.

    Hidden states or a sparse prefix that were refused do not count as a failure: without them the request would not
    have failed.
    """
    if request.is_poisoned:
        return
    request.is_poisoned = True
    if request.request_id in message.restores_refused:
        refused(step.state, request)
    elif request.request_id in message.sparse_refused and request.sparse.span is not None:
        sparse_refused(step.state, request)
    else:
        request.failures += 1
    withdraw(step.state, request)
    step.state.count("chunks_failed")
    if request.state in (RequestState.PREFILLING, RequestState.DECODING):
        preempt(step, worker, request)


def request_finished(step: Step, worker: Worker, request: Request, message: RequestFinished | FinishedToo) -> None:
    """Finish a request that the worker ended for its caller."""
    step.state.count(f"finished_{message.reason}")
    valid = -1 if message.reason != "error" else 0
    output = _whole_tokens(message.output)
    _leave_worker(step, worker, request, output, valid)
    if request.submit.cache.leases or request.submit.cache.returns_in_ms:
        settle_leases(step, request, request.submit.prompt + output)
    forget(step, request, RequestEvent.FINISHED)


def request_preempted(step: Step, worker: Worker, request: Request, message: RequestPreempted) -> None:
    """Queue a preempted request again in its old place, or end it if it was to end or failed too often."""
    state = step.state
    output = _whole_tokens(message.output)
    _leave_worker(step, worker, request, output, -1)
    if request.failures >= state.config.max_attempts:
        fail(step, request, AttemptsExhausted.code, "the request failed too often")
        return
    if request.ending:
        fail(step, request, FAILURE_CODES[request.ending])
        return
    request.state = next_state(request.state, RequestEvent.PREEMPTED)
    request.attempt += 1
    keep_output(request, output)
    enqueue(step, request)


def text_missing(step: Step, worker: Worker, request: Request | None) -> None:
    """Forget the texts of a worker that lacks a kept one, and start the request again, if it still exists.

    This is no failure of the request, which was not even admitted; the order to stop it is answered behind its batch.
    """
    step.state.count("texts_missing")
    forget_texts(worker.texts)
    if request is not None and request.state in (RequestState.PREFILLING, RequestState.DECODING):
        request.is_poisoned = True
        preempt(step, worker, request)


def keep_output(request: Request, output: bytes) -> None:
    """Let the next attempt begin behind these output tokens (packed int32).

    One token at least is left to sample: the gateway drops a repeated one, but its sampling ends the request.
    """
    most = (request.submit.sampling.max_tokens - 1) * 4
    if len(output) >= len(request.output):
        request.output = output[:most]


def _leave_worker(step: Step, worker: Worker, request: Request, output: bytes, valid: int) -> None:
    """Take an admitted request off its worker: its pages go to the tree or back to the pool.

    ``valid`` is the number of tokens whose KV may be kept; -1 for all.
    """
    state = step.state
    worker.work.unplanned -= request.token_count - request.planned
    has_new_tokens = len(output) > len(request.output)
    # A sampled token proves that the whole prompt, loads included, was computed, even if BatchDone comes later.
    if worker.work.batches:
        settle_loads_of(step, worker, request, is_proven=has_new_tokens and not request.is_poisoned)
    tokens = request.tokens
    known = request.computed
    if has_new_tokens and not request.is_poisoned:
        tokens = request.submit.prompt + output
        known = len(tokens) // 4 - 1
    known = min(known, len(request.pages) // 4 * state.tree.page_size)
    known = known if valid < 0 else min(valid, known)
    ended(state, worker, request.admission, len(output) // 4)
    end = publish_final(step, request, worker, tokens, known)
    if end is not None and state.config.copies_at_rest and state.config.host_tier:
        note_end(state, worker, end)
    if request.hidden.lease:
        leave_lease(step, request, tokens, known, is_good=not request.is_poisoned and valid != 0)
    if state.storages:
        sequence_computed(step, worker, request, tokens, known, end)
    withdraw(state, request)
    charge_output(worker, request, max(0, len(output) - len(request.output)) // 4)
    if worker.lease_waits:
        drop_lease_wait(worker, request.request_id)
    if request.hidden.run is not None:
        drop_run(state, request)
    request.prefetch.kv = request.sparse.span = None
    worker.work.running.remove(request.request_id)
    request.worker_id = ""


def _whole_tokens(output: bytes) -> bytes:
    return output[: len(output) // 4 * 4]


def end_early(step: Step, request: Request, reason: str) -> None:
    """End a request with finish reason ``reason`` (``cancelled`` or ``deadline``), whatever its state.

    A running request is aborted by its worker, which answers RequestFinished; until then its pages are in use.
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
        if worker.lease_waits:
            drop_lease_wait(worker, request.request_id)
        step.to_worker(worker, AbortRequest(request_id=request.request_id, attempt=request.attempt, reason=reason))


def cancel_gateway(step: Step, gateway_id: str) -> None:
    """Cancel all requests of a gateway that is gone."""
    for request in list(step.state.requests.values()):
        if request.submit.gateway_id == gateway_id:
            end_early(step, request, "cancelled")
