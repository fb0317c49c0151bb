"""Batches: started prompts first, then new requests in order, a few batches ahead of each worker."""

from __future__ import annotations

from services.scheduler.core.admission import Verdict, try_admit
from services.scheduler.core.leases import serve_leases
from services.scheduler.core.lifecycle import RequestState
from services.scheduler.core.promotion import promote
from services.scheduler.core.state import Batch, CellState, Chunk, Load, Request, Worker, count
from services.scheduler.core.tiers import keep_reserve
from services.scheduler.core.turn import Turn
from shared.messages.worker_plans import PageLoad, PrefillChunk, RunBatch


def schedule(turn: Turn) -> None:
    """Give every worker what it can take now: leases first, then batches, then room ahead of need."""
    for worker in turn.state.workers.values():
        serve_leases(turn, worker)
        while len(worker.batches) < turn.state.config.batches_ahead and _send_batch(turn, worker):
            pass
        keep_reserve(turn, worker)
        promote(turn, worker)


def _send_batch(turn: Turn, worker: Worker) -> bool:
    """Form one batch and send it; returns whether there was anything to do."""
    state = turn.state
    budget = state.config.max_batch_tokens
    chunks: list[Chunk] = []
    loads: list[tuple[PageLoad, Load]] = []
    for name in worker.running:
        request = state.requests[name]
        if budget and request.state is RequestState.PREFILLING and request.planned < request.token_count:
            budget -= _plan_chunk(state, request, budget, chunks)
    if budget and not worker.lease_waits:
        _admit_waiting(turn, worker, budget, chunks, loads)
    if not chunks:
        return False
    order = RunBatch(
        chunks=tuple(
            PrefillChunk(request_id=chunk.request_id, attempt=chunk.attempt, start=chunk.start, end=chunk.end)
            for chunk in chunks
        ),
        loads=tuple(order for order, _ in loads),
    )
    plan = turn.to_worker(worker, order)
    worker.batches.append(Batch(plan, chunks, [load for _, load in loads]))
    count(state, "batches_planned")
    return True


def _admit_waiting(
    turn: Turn, worker: Worker, budget: int, chunks: list[Chunk], loads: list[tuple[PageLoad, Load]]
) -> None:
    """Admit in order of the queue until the budget, the worker's places or its pages are used up."""
    state = turn.state
    for name in list(worker.queue):
        if not budget or len(worker.running) >= state.config.max_running:
            return
        request = state.requests[name]
        verdict, load = try_admit(turn, request, worker)
        if verdict is Verdict.NO_ROOM:
            return
        if verdict is Verdict.DEFERRED:
            continue
        if load is not None:
            loads.append(load)
        budget -= _plan_chunk(state, request, budget, chunks)


def _plan_chunk(state: CellState, request: Request, budget: int, chunks: list[Chunk]) -> int:
    """Plan the next tokens of a request's prompt; returns how many."""
    start = request.planned
    end = min(request.token_count, start + budget)
    chunks.append(Chunk(request.request_id, request.attempt, start, end))
    request.planned = end
    count(state, "prefill_tokens_planned", end - start)
    return end - start
