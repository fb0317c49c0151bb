"""Restorations: chunks of an admitted request's prompt that are restored from hidden states instead of computed.

A run of hidden states outlives admission: each batch restores the chunks that have arrived by then. Holes of a run are
computed between its stretches, and tokens behind the run as always. Restored KV equals computed KV (HCache 3.1), so a
restored chunk counts as a computed one: it enters the tree, and others share it. A chunk that the worker refuses,
because a page is not what was saved, costs its request the attempt, and that request's hidden states are not used
again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.prefix_tree import IDENTITY_BYTES, PAGE_NUMBER_BYTES
from services.scheduler.core.explain.explanations import note_restored
from services.scheduler.core.hidden.hidden_in_flight import (
    HiddenRun,
    hole_at,
    page_at,
    stretch_end,
    tokens_of_run,
)
from services.scheduler.core.hidden.hidden_runs import drop_run, extend_run, free_restored
from services.scheduler.core.hidden.partition import layer_costs, pipelined_us
from services.scheduler.core.rates import token_us
from services.scheduler.core.tiers.under_way import Chunk
from shared.messages.worker_plans import RestoreChunk

if TYPE_CHECKING:
    from services.scheduler.core.queue.batch_builder import BatchBuilder
    from services.scheduler.core.request import Request
    from services.scheduler.core.state import CellState, Worker
    from services.scheduler.core.step import Step
    from shared.messages.pools import KvGeometry
    from shared.messages.worker_events import BatchDone

LEAST_SHARE = 1 / 8
"""Least share of a computed token that a restored one counts as in a batch's budget."""


def is_restoring(request: Request) -> bool:
    """Return whether the next tokens of an admitted request come from hidden states. Changes nothing."""
    run = request.hidden.run
    return run is not None and request.planned < run.goal and hole_at(run, request.planned) is None


def end_of_computing(request: Request) -> int:
    """Return where computing the next tokens ends: at the last token, or where hidden states go on. Changes nothing."""
    hole = hole_at(request.hidden.run, request.planned) if request.hidden.run is not None else None
    return request.token_count if hole is None else hole.end


def keep_usable_run(state: CellState, request: Request, cached: int) -> None:
    """Drop the run of a request admitted with ``cached`` tokens, unless hidden states that arrived continue there."""
    run = request.hidden.run
    if run is not None and not run.depth <= cached < run.arrived:
        state.count("hidden_runs_unusable")
        drop_run(state, request)


def plan_restore(state: CellState, worker: Worker, request: Request, builder: BatchBuilder) -> None:
    """Plan to restore the next tokens of a request, as far as they have arrived and the budget allows.

    Where the next ones have not arrived, nothing is planned: the request is served again when they have. Whole pages
    are restored, one at least: the loads of a request that was just admitted go with its first chunk.
    """
    run = request.hidden.run
    if run is None or request.planned >= run.arrived:
        return
    page_size = state.tree.page_size
    share = restored_share(state, worker)
    room = max(page_size, int(builder.budget / share) // page_size * page_size)
    start = request.planned
    end = min(start + room, stretch_end(run, start, run.arrived))
    first, last = page_at(run, start, page_size), page_at(run, end, page_size)
    order = RestoreChunk(
        request_id=request.request_id,
        attempt=request.attempt,
        start=start,
        end=end,
        storage_id=run.storage_id,
        hidden_pages=run.pages[first * PAGE_NUMBER_BYTES : last * PAGE_NUMBER_BYTES],
        identities=run.identities[first * IDENTITY_BYTES : last * IDENTITY_BYTES],
        recomputed=run.recomputed,
    )
    chunk = Chunk(request.request_id, request.attempt, start, end, is_restored=True)
    builder.add_restored(chunk, order, share, loaded_share(state, worker))
    request.planned = end
    worker.work.unplanned -= end - start
    state.count("restored_tokens_planned", end - start)


def restored_share(state: CellState, worker: Worker) -> float:
    """Return the device time of a restored token over that of a computed one, from 1/8 to 1. Changes nothing.

    As observed on this worker or, before that, by the profile's cost of the layers of a hidden page.
    """
    costs, layout = layer_costs(state, worker), _layout(state, worker)
    computed_us = costs.layers * costs.token_us if costs is not None else token_us(state, worker)
    observed = worker.restoring.per_us(0.0)
    share = 0.0
    if observed > 0:
        share = 1 / observed / computed_us
    elif costs is not None and layout is not None:
        share = (layout.absent * costs.token_us + layout.from_hidden * costs.hidden_us) / computed_us
    return min(1.0, max(LEAST_SHARE, share))


def loaded_share(state: CellState, worker: Worker) -> float:
    """Return the bytes moved to the device to restore a token over those to load its KV. Changes nothing."""
    layout, geometry = _layout(state, worker), state.geometry
    return layout.page_bytes / geometry.page_bytes if layout is not None and geometry is not None else 1.0


def _layout(state: CellState, worker: Worker) -> KvGeometry | None:
    """Return the geometry of hidden pages on a worker's node, or None. Changes nothing."""
    storage = state.storage_of(worker)
    return storage.hidden.handle.geometry if storage is not None and storage.hidden.handle is not None else None


def tokens_to_restore(request: Request, cached: int) -> int:
    """Return how many tokens a waiting request would restore if admitted with ``cached`` tokens. Changes nothing."""
    run = request.hidden.run
    return tokens_of_run(run, cached, run.goal) if run is not None and run.depth <= cached < run.arrived else 0


def run_went_on(step: Step, request: Request, chunk: Chunk, message: BatchDone) -> None:
    """Free the hidden pages of a chunk that was restored, or of a hole that was computed, and extend the run.

    After its last chunk the run is over.
    """
    if request.hidden.run is None:
        return
    if chunk.is_restored and message.restored_tokens > 0:
        part = (chunk.end - chunk.start) / message.restored_tokens
        request.hidden.run.restored_us += max(0, message.restore_us) * min(1.0, part)
        if step.state.recollection is not None:
            note_restored(step.state.recollection, request, chunk)
    free_restored(step.state, request)
    extend_run(step, request)
    end_run(step.state, request)


def refused(state: CellState, request: Request) -> None:
    """Drop the run of a request whose hidden pages were not what was saved: it starts again without hidden states."""
    state.count("restores_refused")
    request.hidden.refusals += 1
    drop_run(state, request)


def end_run(state: CellState, request: Request) -> None:
    """Forget a run with nothing left and nothing to follow; record the error of its prediction.

    The observed time is combined like the predicted one: its fetches as the storage reports them, which includes their
    wait for the disk, and its restorations as the worker reports them, the shorter hidden by the longer except for a
    part (:func:`pipelined_us`). The request's wait for admission is in neither.
    """
    run = request.hidden.run
    if run is not None and not run.fetch and run.depth == run.end == run.goal:
        request.hidden.run = None
        _note(state, run)


def _note(state: CellState, run: HiddenRun) -> None:
    observed_us = pipelined_us(run.disk_us, run.restored_us, run.chunks)
    if run.predicted_us > 0 and run.restored_us > 0:
        state.predictions.note(run.kind, run.predicted_us, observed_us)
