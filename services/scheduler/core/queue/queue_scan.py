"""The scan of a worker's queue while a batch is formed: requests that could run now, and those better off waiting.

Nothing here changes anything. Findings are applied by :func:`batching.apply_finding`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.scheduler.core.cache.prefix_match import find_path, reach
from services.scheduler.core.hidden.restorations import loaded_share, restored_share, tokens_to_restore
from services.scheduler.core.lifecycle import WaitKind
from services.scheduler.core.queue.batch_builder import Candidate, stand_on, starts_of_loads
from services.scheduler.core.sparse.sparse_prefixes import span_for
from services.scheduler.core.waiting.fair_share import first_in_line, opened_by
from services.scheduler.core.waiting.waits import find_aside

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from services.scheduler.core.cache.prefix_match import PrefixMatch
    from services.scheduler.core.cache.prefix_tree import Path
    from services.scheduler.core.queue.batch_builder import BatchBuilder
    from services.scheduler.core.request import Request
    from services.scheduler.core.sparse.sparse_records import SparseSpan
    from services.scheduler.core.state import CellState, Worker
    from services.scheduler.core.waiting.waits import Aside


@dataclass(slots=True, eq=False)
class Finding:
    """The result of looking at one waiting request."""

    request: Request
    path: Path
    found: PrefixMatch
    cached: int  # Tokens of the prompt that it reuses.
    span: SparseSpan | None = None  # Its sparse prefix behind them.
    aside: Aside | None = None  # What it should wait for instead of running.

    @property
    def is_choice_void(self) -> bool:
        """Whether the sparse prefix that was chosen for it is useless by now.

        While a part of its prefix is being loaded that is not known: the choice may begin behind that part.
        """
        is_loading = self.aside is not None and self.aside.kind is WaitKind.LOAD
        return self.span is None and self.request.sparse.choice is not None and not is_loading


def look_at(
    state: CellState, worker: Worker, request: Request, loading: Mapping[int, str], ahead: Mapping[str, None]
) -> Finding:
    """Look at a waiting request. Changes nothing.

    ``loading`` has the nodes that the batch loads, ``ahead`` the requests that go before.
    """
    path = find_path(state, request)
    found = reach(state, path, worker, loading)
    cached = found.pages * state.tree.page_size
    span = None if request.sparse.choice is None else span_for(state, request, worker, cached)
    aside = find_aside(state, worker, request, found, cached if span is None else span.end, ahead)
    return Finding(request, path, found, cached, span, aside)


def candidate_of(state: CellState, worker: Worker, finding: Finding, span: SparseSpan | None, stage: int) -> Candidate:
    """Return the candidate for a request that may run now, with its tokens to load and to compute. Changes nothing."""
    request, cached = finding.request, finding.cached
    load = finding.found.loaded_pages * state.tree.page_size
    compute = request.token_count - (cached if span is None else span.end)
    restored = 0 if request.hidden.run is None else tokens_to_restore(request, cached)
    if restored:
        load += round(restored * loaded_share(state, worker))
        compute -= restored - round(restored * restored_share(state, worker))
    return Candidate(request, finding.path, finding.found, load, compute, stage)


def computes_for_others(request: Request) -> bool:
    """Return whether others may rely on what a request would compute: it is exact and all its own work.

    A request with a fetch in flight does not compute all of that, or it would have waited.
    """
    return not request.prefetch.fetch and request.sparse.choice is None


def bundle_hits_behind(state: CellState, worker: Worker, builder: BatchBuilder, seen: Collection[str]) -> list[Request]:
    """Return requests of the window, not seen yet, that reuse what the batch loads, in order. Changes nothing.

    Only those of the highest priority that waits: a cheap request does not pass a more urgent one.
    """
    starts = starts_of_loads(state.tree, builder)
    page_token_bytes = state.tree.page_token_bytes
    alike = opened_by(worker, dict.fromkeys(tokens[:page_token_bytes] for _, tokens in starts))
    if not alike:
        return []
    names = [name for name in first_in_line(state, worker, state.config.queue_window) if name not in seen]
    if not names:
        return []
    highest = state.requests[names[0]].submit.priority  # The window begins with the most urgent.
    standing = stand_on(state, starts, [state.requests[name] for name in names if name in alike])
    return [request for request in standing if request.submit.priority == highest]
