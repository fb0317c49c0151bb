"""A look at a worker's queue while a batch is formed: who could run now, who waits for others, who brings what."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.cache.prefix_match import matched_path, reach
from services.scheduler.core.hidden.restorations import loaded_share, restored_share, tokens_to_restore
from services.scheduler.core.lifecycle import RequestState
from services.scheduler.core.queue.batch_builder import BatchBuilder, Candidate, stand_on, starts_of_loads
from services.scheduler.core.restoring.fetch_waits import waits_for_fetch
from services.scheduler.core.restoring.prefetch import prefetch_for_first
from services.scheduler.core.sparse.sparse_prefixes import current_span
from services.scheduler.core.waiting.fair_share import first_in_line, opened_by
from services.scheduler.core.waiting.waits import announce, defer_for_load, defer_for_producer, find_producer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.scheduler.core.request import Request
    from services.scheduler.core.state import Worker
    from services.scheduler.core.step import Step

_FIRST_LOOK = 16


class QueueScan:
    """An iterator over candidates in the ready order, at most ``queue_window`` of them.

    Requests that are better off waiting are deferred on the way and never come. One that was given out and not
    admitted before the next is looked at marks what it would compute (in-queue, Strata 4.3.1), so that those
    behind it that share it wait for it.
    """

    def __init__(self, step: Step, worker: Worker, builder: BatchBuilder) -> None:
        self._turn, self._worker, self._draft = step, worker, builder
        self._names = self._in_order()
        self._seen: dict[str, None] = {}  # Looked at, whatever came of it.
        self._ahead: dict[str, None] = {}  # Given out.
        self._passed: Candidate | None = None

    def __iter__(self) -> QueueScan:
        return self

    def __next__(self) -> Candidate:
        for name in self._names:
            candidate = self._look_at(name)
            if candidate is not None:
                return candidate
        raise StopIteration

    def bundle_hits(self) -> list[Candidate]:
        """Those of the window's rest that stand on what the batch loads, in order. The others keep their place.

        Only requests of the highest priority that waits: a cheap one does not pass one that is more urgent.
        """
        state = self._turn.state
        requests, seen = state.requests, self._seen
        starts = starts_of_loads(state.tree, self._draft)
        page_bytes = state.tree.page_token_bytes
        alike = opened_by(self._worker, dict.fromkeys(tokens[:page_bytes] for _, tokens in starts))
        if not alike:
            return []
        names = [name for name in first_in_line(state, self._worker, state.config.queue_window) if name not in seen]
        if not names:
            return []
        highest = requests[names[0]].submit.priority  # The window begins with the most urgent.
        hits = []
        for request in stand_on(state, starts, [requests[name] for name in names if name in alike]):
            if request.submit.priority == highest:
                candidate = self._look_at(request.request_id)
                if candidate is not None:
                    hits.append(candidate)
        return hits

    def _in_order(self) -> Iterator[str]:
        """The window, at first only the few that most batches take."""
        state = self._turn.state
        window = state.config.queue_window
        first = min(_FIRST_LOOK, window)
        for limit in (first, window):
            names = first_in_line(state, self._worker, limit)
            if limit == first:
                prefetch_for_first(self._turn, self._worker, names)
            for name in names:
                if name not in self._seen and len(self._seen) < window:
                    yield name

    def _look_at(self, name: str) -> Candidate | None:
        passed = self._passed
        if passed is not None and passed.request.state is RequestState.WAITING and _computes_for_others(passed.request):
            uncached = passed.request.token_count - passed.found.pages * self._turn.state.tree.page_size
            announce(self._turn.state, passed.request, uncached)
        self._seen[name] = None
        request = self._turn.state.requests[name]
        self._passed = _examine(self._turn, self._worker, self._draft, request, self._ahead)
        if self._passed is not None:
            self._ahead[name] = None
        return self._passed


def _computes_for_others(request: Request) -> bool:
    """Whether others may rely on what a request that could run would compute: it is exact and all its own work.

    One that is fetched for does not compute all of that, or it would have waited.
    """
    return not request.prefetch.fetch and request.sparse.choice is None


def _examine(
    step: Step, worker: Worker, builder: BatchBuilder, request: Request, ahead: dict[str, None]
) -> Candidate | None:
    """What a request would load and compute now; None if it is better to wait, which it does from now on."""
    state = step.state
    path = matched_path(state, request)
    found = reach(state, path, worker, builder.loading)
    if found.awaited is not None and not request.patience.is_over:
        defer_for_load(step, request, worker, found.awaited)
        return None
    page_size = state.tree.page_size
    cached = found.pages * page_size
    span = None if request.sparse.choice is None else current_span(state, request, worker, cached)
    producer = find_producer(state, request, worker, cached if span is None else span.end, ahead)
    if producer is not None:
        name, needed = producer
        defer_for_producer(step, request, worker, name, needed, needed - cached)
        return None
    if request.prefetch.fetch or request.prefetch.is_due or request.prefetch.follows or request.hidden.run is not None:
        # To make room for a fetch may evict or cut what others matched.
        builder.stage += bool(request.prefetch.is_due or request.prefetch.follows)
        if waits_for_fetch(step, request, worker, cached):
            return None
        span = None if request.sparse.choice is None else current_span(state, request, worker, cached)
    load, compute = found.loaded_pages * page_size, request.token_count - (cached if span is None else span.end)
    restored = 0 if request.hidden.run is None else tokens_to_restore(request, cached)
    if restored:
        load += round(restored * loaded_share(state, worker))
        compute -= restored - round(restored * restored_share(state, worker))
    return Candidate(request, path, found, load, compute, builder.stage)
