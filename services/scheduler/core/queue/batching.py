"""Batches: started prompts first, then new requests as the schedule has it, a few batches ahead of each worker."""

from __future__ import annotations

from services.scheduler.core.cache.eviction_orders import prepare
from services.scheduler.core.cache.host_admission import drop_above_quotas
from services.scheduler.core.cache.making_room import evict_above_quotas, keep_reserve
from services.scheduler.core.hidden.restorations import end_of_computing, is_restoring, plan_restore
from services.scheduler.core.lifecycle import RequestState
from services.scheduler.core.members.draining import go_on_draining
from services.scheduler.core.queue.admission import try_admit
from services.scheduler.core.queue.batch_builder import BatchBuilder, is_loading_bound
from services.scheduler.core.queue.deferral import wake_load_waiters
from services.scheduler.core.queue.leases import serve_leases
from services.scheduler.core.queue.queue_scan import QueueScan
from services.scheduler.core.queue.schedules import SCHEDULES
from services.scheduler.core.queue.stealing import steal
from services.scheduler.core.state import Batch, Chunk, Request, Worker, count, storage_of, worker_storage_id
from services.scheduler.core.step import Step
from services.scheduler.core.tiers.promotion import promote
from shared.messages.worker_plans import PrefillChunk, RunBatch


def schedule(step: Step, *, everywhere: bool) -> None:
    """Give workers what they can take now; then let idle workers take over what others have no time for.

    Unless it is ``everywhere``, only workers that the turn touched can have something new to do.
    """
    workers = step.state.workers
    is_busy = everywhere
    served = None
    for name in list(workers if everywhere else step.touched):
        if name in workers:
            served = workers[name]
            is_busy |= _serve(step, served)
    for worker in steal(step):
        is_busy |= _serve(step, worker)
    if served is not None and not is_busy:
        prepare(step.state, served.worker_id, worker_storage_id(step.state, served))


def _serve(step: Step, worker: Worker) -> bool:
    """Leases first, then batches, then room ahead of need; returns whether that was much for one step."""
    if worker.drain is not None and worker.drain.is_over:
        return False
    if worker.lease_waits:
        serve_leases(step, worker)
    if worker.load_waiters:
        wake_load_waiters(step.state, worker)
    is_batch_sent = False
    admissions = step.state.admissions
    while len(worker.batches) < step.state.config.batches_ahead and _send_batch(step, worker):
        is_batch_sent = True
    if worker.drain is not None:  # Nothing comes that room or promotions would be for.
        return go_on_draining(step, worker) or is_batch_sent
    admissions = step.state.admissions - admissions
    is_evicting = keep_reserve(step, worker, is_busy=is_batch_sent, admissions=admissions)
    is_trimming = bool(step.state.quotas.above) and _keep_quotas(step, worker, is_busy=is_batch_sent)
    # It stays due: the step has done enough, and the worker's next input goes on with it. What is promoted displaces
    # what is within quotas, so whoever is above one gives way before.
    if not is_batch_sent and not is_trimming:
        promote(step, worker)
    return is_batch_sent or is_evicting or is_trimming


def _keep_quotas(step: Step, worker: Worker, *, is_busy: bool) -> bool:
    """Evict some of what is above quotas on a worker and in its node's host pool; whether the worker had any."""
    storage = storage_of(step.state, worker)
    if storage is not None:
        drop_above_quotas(step, storage)
    return evict_above_quotas(step, worker, is_busy=is_busy)


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
    count(state, "batches_planned")
    count(state, "batches_loading_bound", int(is_bound))
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
    if is_restoring(request):
        plan_restore(step.state, worker, request, builder)
        return
    start = request.planned
    end = min(end_of_computing(request), start + builder.budget)
    builder.add_chunk(Chunk(request.request_id, request.attempt, start, end))
    request.planned = end
    worker.unplanned -= end - start
    count(step.state, "prefill_tokens_planned", end - start)
