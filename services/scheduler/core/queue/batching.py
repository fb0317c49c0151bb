"""Batches: started prompts first, then new requests by the schedule, a few batches ahead of each worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.prefix_match import note_path
from services.scheduler.core.hidden.restorations import end_of_computing, is_restoring, plan_restore
from services.scheduler.core.lifecycle import RequestState
from services.scheduler.core.queue.admission import try_admit
from services.scheduler.core.queue.batch_builder import BatchBuilder, bundle_hits_among, is_loading_bound
from services.scheduler.core.queue.queue_scan import bundle_hits_behind, candidate_of, computes_for_others, look_at
from services.scheduler.core.queue.schedules import SCHEDULES
from services.scheduler.core.restoring.fetch_waits import waits_for_fetch
from services.scheduler.core.restoring.prefetch import prefetch_for_first
from services.scheduler.core.sparse.sparse_prefixes import drop_choice, span_for
from services.scheduler.core.tiers.lending import lies_elsewhere
from services.scheduler.core.tiers.under_way import Batch, Chunk
from services.scheduler.core.waiting.fair_share import first_in_line
from services.scheduler.core.waiting.waits import announce, defer
from shared.errors import InvariantViolated
from shared.messages.cell_events import CellConfig
from shared.messages.worker_plans import PrefillChunk, RunBatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from services.scheduler.core.queue.batch_builder import Candidate
    from services.scheduler.core.queue.queue_scan import Finding
    from services.scheduler.core.request import Request
    from services.scheduler.core.state import Worker
    from services.scheduler.core.step import Step
    from services.scheduler.core.tiers.under_way import Load
    from shared.messages.worker_events import DeviceFacts


_USUAL = CellConfig()

_FIRST_LOOK = 16
"""Requests that are scanned first for a batch: most batches take no more."""


def send_batches(step: Step, worker: Worker) -> bool:
    """Send a worker as many batches as it may have ahead; return whether any was sent."""
    is_any = False
    while len(worker.work.batches) < step.state.config.batches_ahead and _send_batch(step, worker):
        is_any = True
    return is_any


def _send_batch(step: Step, worker: Worker) -> bool:
    """Form one batch and send it; return whether there was anything to do.

    Where prefill fills bubbles, chunks of a loading-bound batch that need none of its loads follow as a second batch
    that the worker can compute meanwhile.
    """
    if not worker.work.unplanned and not worker.line.queue.size:
        return False
    state = step.state
    config = state.config
    budget, most = _bounds(config, worker.device)
    builder = BatchBuilder(budget=budget, places=most - len(worker.work.running))
    if worker.work.unplanned:
        for name in worker.work.running:
            request = state.requests[name]
            is_started = request.state is RequestState.PREFILLING and request.planned < request.token_count
            if builder.budget > 0 and is_started:
                _plan_chunk(step, worker, request, builder)
    if worker.line.queue.size and not builder.is_full and not worker.lease_waits:
        _admit_waiting(step, worker, builder)
    if not builder.chunks:
        return False
    is_bound = is_loading_bound(state, worker, builder)
    fills = is_bound and config.bubble_filling and bool(builder.orders)
    chunks, rest = builder.split() if fills and config.bubble_prefill else (builder.chunks, [])
    order = RunBatch(
        chunks=_ordered(chunks),
        loads=tuple(builder.orders),
        fill_bubble=fills,
        restores=tuple(builder.restores),
        bubble_prefill=fills and config.bubble_prefill,
    )
    _send(step, worker, order, chunks, builder.loads)
    if rest:
        _send(step, worker, RunBatch(chunks=_ordered(rest)), rest, [])
        state.count("batches_split")
    state.count("batches_planned")
    state.count("batches_loading_bound", int(is_bound))
    return True


def _bounds(config: CellConfig, device: DeviceFacts | None) -> tuple[int, int]:
    """Return the tokens of a batch and the requests at once, at most.

    The cell's settings, or the device's own where the cell leaves them to it, or the usual ones where the device
    reports nothing.
    """
    tokens, requests = (0, 0) if device is None else (device.max_batch_tokens, device.max_running)
    return (
        config.max_batch_tokens or tokens or _USUAL.max_batch_tokens,
        config.max_running or requests or _USUAL.max_running,
    )


def _send(step: Step, worker: Worker, order: RunBatch, chunks: list[Chunk], loads: list[Load]) -> None:
    tokens = sum(chunk.end - chunk.start for chunk in chunks)
    worker.work.batches.append(Batch(step.to_worker(worker, order), chunks, loads, tokens))
    worker.work.outstanding += tokens


def _ordered(chunks: list[Chunk]) -> tuple[PrefillChunk, ...]:
    """Return the orders of chunks that are computed."""
    return tuple(
        PrefillChunk(request_id=chunk.request_id, attempt=chunk.attempt, start=chunk.start, end=chunk.end)
        for chunk in chunks
        if not chunk.is_restored
    )


def _admit_waiting(step: Step, worker: Worker, builder: BatchBuilder) -> None:
    """Admit requests by the schedule until the budget, the worker's places or its pages are used up."""
    state = step.state
    schedule = SCHEDULES[state.config.schedule]
    forming = _Forming(step, worker, builder)
    put_aside: list[Candidate] = []
    is_first = True
    for name in forming.names():
        candidate = forming.look(name)
        if candidate is None:
            continue
        if schedule.puts_aside(state, worker, builder, candidate, is_first=is_first):
            put_aside.append(candidate)
            state.count("requests_put_aside")
            continue
        is_first = False
        loading = len(builder.loading)
        if not forming.admit([candidate]):
            return
        while schedule.prefers_bundle_hits and len(builder.loading) > loading:
            loading = len(builder.loading)
            hits = bundle_hits_among(state, builder, put_aside)
            put_aside = [item for item in put_aside if item not in hits]
            if not (forming.admit(hits) and forming.admit(forming.look_for_bundle_hits())):
                return
    if put_aside:
        ordered = schedule.order(put_aside)
        if sorted(map(id, ordered)) != sorted(map(id, put_aside)):
            raise InvariantViolated(f"schedule {schedule.name!r} orders other candidates than those put aside")
        forming.admit(ordered)


class _Forming:
    """One formation of a batch: the requests looked at, and those that go ahead.

    A candidate that was put aside marks what it would compute (in-queue, Strata 4.3.1) before the next is looked at, so
    that later requests that share it wait for it.
    """

    def __init__(self, step: Step, worker: Worker, builder: BatchBuilder) -> None:
        self._step, self._worker, self._builder = step, worker, builder
        self._seen: dict[str, None] = {}  # Requests looked at, with any result.
        self._ahead: dict[str, None] = {}  # Names of the candidates.
        self._passed: Candidate | None = None  # The last candidate.

    def names(self) -> Iterator[str]:
        """Yield the names in the window in ready order, at first only the few that most batches take."""
        state = self._step.state
        window = state.config.queue_window
        first = min(_FIRST_LOOK, window)
        for limit in (first, window):
            names = first_in_line(state, self._worker, limit)
            if limit == first and state.storages:
                prefetch_for_first(self._step, self._worker, names)
            for name in names:
                if name not in self._seen and len(self._seen) < window:
                    yield name

    def look(self, name: str) -> Candidate | None:
        """Look at a request and apply the finding; return None if it is better off waiting, which it then does."""
        step, passed = self._step, self._passed
        state = step.state
        if passed is not None and passed.request.state is RequestState.WAITING and computes_for_others(passed.request):
            announce(state, passed.request, passed.request.token_count - passed.found.pages * state.tree.page_size)
        self._seen[name] = None
        found = look_at(state, self._worker, state.requests[name], self._builder.loading, self._ahead)
        self._passed = apply_finding(step, self._worker, self._builder, found)
        if self._passed is not None:
            self._ahead[name] = None
        return self._passed

    def look_for_bundle_hits(self) -> list[Candidate]:
        """Return candidates from further behind that reuse what the batch loads; the others keep their place."""
        behind = bundle_hits_behind(self._step.state, self._worker, self._builder, self._seen)
        looked_at = [self.look(request.request_id) for request in behind]
        return [candidate for candidate in looked_at if candidate is not None]

    def admit(self, candidates: Iterable[Candidate]) -> bool:
        """Admit these in turn; return False once one finds no room, or the batch is full."""
        for candidate in candidates:
            if not try_admit(self._step, candidate, self._worker, self._builder):
                return False
            _plan_chunk(self._step, self._worker, candidate.request, self._builder)
            if self._builder.is_full:
                return False
        return True


def apply_finding(step: Step, worker: Worker, builder: BatchBuilder, finding: Finding) -> Candidate | None:
    """Apply a finding and return the candidate; None if the request waits from now on, out of the ready order."""
    state, request, cached = step.state, finding.request, finding.cached
    note_path(state, request, finding.path)
    if finding.is_choice_void:
        drop_choice(state, request)
    if finding.aside is not None:
        defer(step, request, worker, finding.aside)
        return None
    span, prefetch = finding.span, request.prefetch
    if cached < prefetch.foreseen and not (prefetch.fetch or prefetch.is_again):
        prefetch.is_due = True  # A part that was cached when it was queued has been evicted.
    elif not prefetch.fetch and cached < sum(pages for _, pages in finding.path) * state.tree.page_size:
        # A part that was nowhere when it was queued, or was evicted here, may be in another node's memory now.
        prefetch.is_due |= lies_elsewhere(state, request, worker, finding.path, finding.found.pages)
    is_due = prefetch.is_due or prefetch.looks_again
    if prefetch.fetch or is_due or prefetch.follows or request.hidden.run is not None:
        # Making room for a fetch may evict or cut what others matched.
        builder.stage += bool(is_due or prefetch.follows)
        if waits_for_fetch(step, request, worker, cached):
            return None
        span = None if request.sparse.choice is None else span_for(state, request, worker, cached)
        if span is None and request.sparse.choice is not None:
            drop_choice(state, request)
    return candidate_of(state, worker, finding, span, builder.stage)


def _plan_chunk(step: Step, worker: Worker, request: Request, builder: BatchBuilder) -> None:
    """Plan the next tokens of a request's prompt, as many as the budget allows: restored where possible."""
    start, end = request.planned, request.token_count
    if request.hidden.run is not None:
        if is_restoring(request):
            plan_restore(step.state, worker, request, builder)
            return
        end = end_of_computing(request)
    end = min(end, start + builder.budget)
    builder.add_chunk(Chunk(request.request_id, request.attempt, start, end))
    request.planned = end
    worker.work.unplanned -= end - start
    step.state.count("prefill_tokens_planned", end - start)
