"""Balanced batch formation (Strata 4.3.2, Algorithm 1).

The first request of the queue is always taken first. A request that shares a load of the batch (a bundle hit) is
preferred to all others, because its load costs nothing more. A request that would add to the wait for loads of a
batch that is loading-bound with it is put aside; those fill up the rest of the batch, in their order. Every formation
begins with the head of the queue, so the oldest that was put aside is first in a later one: no request starves.

The paper puts aside every request that leaves the ratio above the limit. Once the head alone is loading-bound that
would be all of them, computation without a load included, which is just what balances the batch. So a request is put
aside only if it also brings more load than computation by that ratio, that is, if it makes the wait longer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.queue.batch_builder import is_loading_bound
from services.scheduler.core.queue.schedules import Schedule, register_schedule
from services.scheduler.core.rates import load_compute_ratio

if TYPE_CHECKING:
    from services.scheduler.core.queue.batch_builder import BatchBuilder, Candidate
    from services.scheduler.core.state import CellState, Worker


@register_schedule
class Balanced(Schedule):
    """Algorithm 1: load and computation of a batch are kept in balance."""

    name = "balanced"
    prefers_bundle_hits = True

    def puts_aside(
        self, state: CellState, worker: Worker, builder: BatchBuilder, candidate: Candidate, *, is_first: bool
    ) -> bool:
        """Return whether a candidate would lengthen the batch's wait for loads; never for the first."""
        if is_first or not candidate.load:
            return False
        if not is_loading_bound(state, worker, builder, candidate.load, candidate.compute):
            return False
        context = candidate.request.token_count - candidate.compute
        return candidate.load > load_compute_ratio(state, worker, context) * candidate.compute
