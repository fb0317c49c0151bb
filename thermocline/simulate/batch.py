"""A batch while a virtual worker carries it out, what may go ahead of it, and the totals over all of them."""

from __future__ import annotations

from dataclasses import dataclass

from shared.messages import worker_plans as plans
from shared.messages.worker_plans import RunBatch
from thermocline.simulate.cost import Piece
from thermocline.simulate.running import RunningRequest


@dataclass(slots=True)
class WorkerFigures:
    """What a worker did, in totals. Seconds are of its own time line unless they say link."""

    busy_s: float = 0.0  # In steps.
    stall_s: float = 0.0  # Of it, waiting for loads.
    load_s: float = 0.0  # Of link time, for loads.
    bubble_s: float = 0.0  # In decode steps that ran while a batch was only loading.
    batches: int = 0
    steps: int = 0
    loaded_tokens: int = 0
    computed_tokens: int = 0
    bubble_tokens: int = 0
    promoted_tokens: int = 0
    promotions: int = 0


@dataclass(slots=True)
class BatchUnderWay:
    """The RunBatch that is being carried out. ``begun_ns`` is when its loads began."""

    number: int
    order: RunBatch
    begun_ns: int
    chunks: list[tuple[RunningRequest, Piece]]
    failed: list[str]
    loaded_tokens: int
    load_s: float
    fill_until_ns: int = 0
    bubble_ns: int = 0
    bubble_tokens: int = 0
    step_begun_ns: int = 0
    stall_s: float = 0.0


def may_overtake(order: plans.WorkerOrder, loading: RunBatch) -> bool:
    """Whether an order behind a batch that is only loading may be carried out before it, as by a real worker."""
    match order:
        case plans.AdmitRequest() | plans.ExtendLease() | plans.PreemptRequest() | plans.AbortRequest():
            return order.request_id not in _named(loading)
        case _:
            return isinstance(order, plans.PromotePages)


def may_go_ahead(order: RunBatch, loading: RunBatch) -> bool:
    """Whether a batch behind one that is only loading may be computed before it: it loads and restores nothing, and
    has no chunk of a request of the other.
    """
    is_alone = _named(loading).isdisjoint(chunk.request_id for chunk in order.chunks)
    return is_alone and not order.loads and not order.restores


def _named(batch: RunBatch) -> frozenset[str]:
    return frozenset([chunk.request_id for chunk in batch.chunks] + [load.request_id for load in batch.loads])
