"""Batches: started prompts first, then new requests as the schedule has it, a few batches ahead of each worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.hidden.restorations import end_of_computing, is_restoring, plan_restore
from services.scheduler.core.lifecycle import RequestState
from services.scheduler.core.queue.admission import try_admit
from services.scheduler.core.queue.batch_builder import BatchBuilder, is_loading_bound
from services.scheduler.core.queue.queue_scan import QueueScan
from services.scheduler.core.queue.schedules import SCHEDULES
from services.scheduler.core.tiers.under_way import Batch, Chunk
from shared.messages.worker_plans import PrefillChunk, RunBatch

if TYPE_CHECKING:
    from services.scheduler.core.request import Request
    from services.scheduler.core.state import Worker
    from services.scheduler.core.step import Step


def send_batches(step: Step, worker: Worker) -> bool:
    """Send a worker as many batches as it may have ahead; returns whether there was any."""
    is_any = False
    while len(worker.batches) < step.state.config.batches_ahead and _send_batch(step, worker):
        is_any = True
    return is_any


def _send_batch(step: Step, worker: Worker) -> bool:
    """Form one batch and send it; returns whether there was anything to do."""
    state = step.state
    config = state.config
    builder = BatchBuilder(budget=config.max_batch_tokens, places=config.max_running - len(worker.running))
    if worker.unplanned:
        for name in worker.running:
            request = state.requests[name]
            is_started = request.state is RequestState.PREFILLING and request.planned < request.token_count
            if builder.budget > 0 and is_started:
                _plan_chunk(step, worker, request, builder)
    if worker.queue.size and not builder.is_full and not worker.lease_waits:
        _admit_waiting(step, worker, builder)
    if not builder.chunks:
        return False
    is_bound = is_loading_bound(state, worker, builder)
    order = RunBatch(
        chunks=tuple(
            PrefillChunk(request_id=chunk.request_id, attempt=chunk.attempt, start=chunk.start, end=chunk.end)
            for chunk in builder.chunks
            if not chunk.is_restored
        ),
        loads=tuple(builder.orders),
        fill_bubble=is_bound and config.bubble_filling and bool(builder.orders),
        restores=tuple(builder.restores),
    )
    plan = step.to_worker(worker, order)
    worker.batches.append(Batch(plan, builder.chunks, builder.loads, builder.tokens))
    worker.outstanding += builder.tokens
    state.count("batches_planned")
    state.count("batches_loading_bound", int(is_bound))
    return True


def _admit_waiting(step: Step, worker: Worker, builder: BatchBuilder) -> None:
    """Admit as the schedule has it until the budget, the worker's places or its pages are used up."""
    state = step.state
    order = SCHEDULES[state.config.schedule]
    for candidate in order(state, worker, builder, QueueScan(step, worker, builder)):
        if not try_admit(step, candidate, worker, builder):
            return
        _plan_chunk(step, worker, candidate.request, builder)
        if builder.is_full:
            return


def _plan_chunk(step: Step, worker: Worker, request: Request, builder: BatchBuilder) -> None:
    """Plan the next tokens of a request's prompt, as many as the budget allows: restored where there is state."""
    start, end = request.planned, request.token_count
    if request.hidden.run is not None:
        if is_restoring(request):
            plan_restore(step.state, worker, request, builder)
            return
        end = end_of_computing(request)
    end = min(end, start + builder.budget)
    builder.add_chunk(Chunk(request.request_id, request.attempt, start, end))
    request.planned = end
    worker.unplanned -= end - start
    step.state.count("prefill_tokens_planned", end - start)
