"""Balanced batch formation (Strata 4.3.2, Algorithm 1).

The first request of the queue is always taken first. A request that stands on what the batch loads already (a
bundle hit) is preferred to all others, because its load costs nothing more. A request that would add to the wait
for loads of a batch that is loading-bound with it is put aside; those fill up what is left, in their order. Every
formation begins with the head of the queue, so the oldest that was put aside is first in a later one: nobody starves.

The paper puts aside whatever leaves the ratio above the limit. Once the head alone is loading-bound that would be
everything, computation without a load included, which is just what balances the batch. So a request is put
aside only if it also brings more load than computation by that ratio, that is, if it makes the wait longer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.queue.batch_builder import BatchBuilder, Candidate, bundle_hits_among, is_loading_bound
from services.scheduler.core.queue.schedules.registry import register_schedule
from services.scheduler.core.rates import load_compute_ratio

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.scheduler.core.queue.schedules.protocol import Candidates
    from services.scheduler.core.state import CellState, Worker


@register_schedule("balanced")
def balanced(state: CellState, worker: Worker, builder: BatchBuilder, candidates: Candidates) -> Iterator[Candidate]:
    """Algorithm 1. The search for bundle hits leaves the others of the window as they are."""
    put_aside: list[Candidate] = []
    is_first = True
    for candidate in candidates:
        if not is_first and _lengthens_wait(state, worker, builder, candidate):
            put_aside.append(candidate)
            state.count("requests_put_aside")
            continue
        is_first = False
        loading = len(builder.loading)
        yield candidate
        while len(builder.loading) > loading:
            loading = len(builder.loading)
            if put_aside:
                found = bundle_hits_among(state, builder, [item.request for item in put_aside])
                names = {request.request_id: None for request in found}
                hits = [item for item in put_aside if item.request.request_id in names]
                put_aside = [item for item in put_aside if item.request.request_id not in names]
                yield from hits
            yield from candidates.bundle_hits()
    yield from put_aside


def _lengthens_wait(state: CellState, worker: Worker, builder: BatchBuilder, candidate: Candidate) -> bool:
    if not candidate.load or not is_loading_bound(state, worker, builder, candidate.load, candidate.compute):
        return False
    context = candidate.request.token_count - candidate.compute
    return candidate.load > load_compute_ratio(state, worker, context) * candidate.compute
