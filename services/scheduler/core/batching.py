"""Batches: started prompts first, then new requests as the schedule has it, a few batches ahead of each worker."""

from __future__ import annotations

from services.scheduler.core.admission import try_admit
from services.scheduler.core.deferral import wake_load_waiters
from services.scheduler.core.draft import Draft, is_loading_bound
from services.scheduler.core.draining import go_on_draining
from services.scheduler.core.host_admission import drop_above_quotas
from services.scheduler.core.leases import serve_leases
from services.scheduler.core.lifecycle import RequestState
from services.scheduler.core.look import Look
from services.scheduler.core.orders import prepare
from services.scheduler.core.promotion import promote
from services.scheduler.core.restorations import end_of_computing, is_restoring, plan_restore
from services.scheduler.core.schedules import SCHEDULES
from services.scheduler.core.state import Batch, Chunk, Request, Worker, count, storage_of, worker_storage_id
from services.scheduler.core.stealing import steal
from services.scheduler.core.tiers import evict_above_quotas, keep_reserve
from services.scheduler.core.turn import Turn
from shared.messages.worker_plans import PrefillChunk, RunBatch


def schedule(turn: Turn, *, everywhere: bool) -> None:
    """Give workers what they can take now; then let idle workers take over what others have no time for.

    Unless it is ``everywhere``, only workers that the turn touched can have something new to do.
    """
    workers = turn.state.workers
    is_busy = everywhere
    served = None
    for name in list(workers if everywhere else turn.touched):
        if name in workers:
            served = workers[name]
            is_busy |= _serve(turn, served)
    for worker in steal(turn):
        is_busy |= _serve(turn, worker)
    if served is not None and not is_busy:
        prepare(turn.state, served.worker_id, worker_storage_id(turn.state, served))


def _serve(turn: Turn, worker: Worker) -> bool:
    """Leases first, then batches, then room ahead of need; returns whether that was much for one step."""
    if worker.drain is not None and worker.drain.is_over:
        return False
    if worker.lease_waits:
        serve_leases(turn, worker)
    if worker.load_waiters:
        wake_load_waiters(turn.state, worker)
    is_batch_sent = False
    admissions = turn.state.admissions
    while len(worker.batches) < turn.state.config.batches_ahead and _send_batch(turn, worker):
        is_batch_sent = True
    if worker.drain is not None:  # Nothing comes that room or promotions would be for.
        return go_on_draining(turn, worker) or is_batch_sent
    admissions = turn.state.admissions - admissions
    is_evicting = keep_reserve(turn, worker, is_busy=is_batch_sent, admissions=admissions)
    is_trimming = bool(turn.state.quotas.above) and _keep_quotas(turn, worker, is_busy=is_batch_sent)
    # It stays due: the step has done enough, and the worker's next input goes on with it. What is promoted displaces
    # what is within quotas, so whoever is above one gives way before.
    if not is_batch_sent and not is_trimming:
        promote(turn, worker)
    return is_batch_sent or is_evicting or is_trimming


def _keep_quotas(turn: Turn, worker: Worker, *, is_busy: bool) -> bool:
    """Evict some of what is above quotas on a worker and in its node's host pool; whether the worker had any."""
    storage = storage_of(turn.state, worker)
    if storage is not None:
        drop_above_quotas(turn, storage)
    return evict_above_quotas(turn, worker, is_busy=is_busy)


def _send_batch(turn: Turn, worker: Worker) -> bool:
    """Form one batch and send it; returns whether there was anything to do."""
    state = turn.state
    config = state.config
    draft = Draft(budget=config.max_batch_tokens, places=config.max_running - len(worker.running))
    if worker.unplanned:
        for name in worker.running:
            request = state.requests[name]
            is_started = request.state is RequestState.PREFILLING and request.planned < request.token_count
            if draft.budget > 0 and is_started:
                _plan_chunk(turn, worker, request, draft)
    if worker.queue.size and not draft.is_full and not worker.lease_waits:
        _admit_waiting(turn, worker, draft)
    if not draft.chunks:
        return False
    is_bound = is_loading_bound(state, worker, draft)
    order = RunBatch(
        chunks=tuple(
            PrefillChunk(request_id=chunk.request_id, attempt=chunk.attempt, start=chunk.start, end=chunk.end)
            for chunk in draft.chunks
            if not chunk.is_restored
        ),
        loads=tuple(draft.orders),
        fill_bubble=is_bound and config.bubble_filling and bool(draft.orders),
        restores=tuple(draft.restores),
    )
    plan = turn.to_worker(worker, order)
    worker.batches.append(Batch(plan, draft.chunks, draft.loads, draft.tokens))
    worker.outstanding += draft.tokens
    count(state, "batches_planned")
    count(state, "batches_loading_bound", int(is_bound))
    return True


def _admit_waiting(turn: Turn, worker: Worker, draft: Draft) -> None:
    """Admit as the schedule has it until the budget, the worker's places or its pages are used up."""
    state = turn.state
    order = SCHEDULES[state.config.schedule]
    for candidate in order(state, worker, draft, Look(turn, worker, draft)):
        if not try_admit(turn, candidate, worker, draft):
            return
        _plan_chunk(turn, worker, candidate.request, draft)
        if draft.is_full:
            return


def _plan_chunk(turn: Turn, worker: Worker, request: Request, draft: Draft) -> None:
    """Plan the next tokens of a request's prompt, as many as the budget allows: restored where there is state."""
    if is_restoring(request):
        plan_restore(turn.state, worker, request, draft)
        return
    start = request.planned
    end = min(end_of_computing(request), start + draft.budget)
    draft.add_chunk(Chunk(request.request_id, request.attempt, start, end))
    request.planned = end
    worker.unplanned -= end - start
    count(turn.state, "prefill_tokens_planned", end - start)
