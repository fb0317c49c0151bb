"""A batch that a virtual worker carries out, the orders that may overtake it, and totals over all batches."""

from __future__ import annotations

from dataclasses import dataclass

from shared.messages import worker_plans as plans
from shared.messages.worker_plans import RunBatch
from thermocline.simulate.cost import Piece
from thermocline.simulate.running import RunningRequest


@dataclass(slots=True)
class WorkerFigures:
    """Totals of one worker. Seconds are of its own time line, except for loads, which are of the link's."""

    busy_s: float = 0.0  # Spent in steps.
    stall_s: float = 0.0  # The part of ``busy_s`` spent waiting for loads.
    load_s: float = 0.0  # Link time of loads.
    bubble_s: float = 0.0  # Spent in decode steps while a batch was only loading.
    batches: int = 0
    steps: int = 0
    loaded_tokens: int = 0
    computed_tokens: int = 0
    bubble_tokens: int = 0
    promoted_tokens: int = 0
    promotions: int = 0


@dataclass(slots=True)
class BatchUnderWay:
    """A RunBatch in progress. ``begun_ns`` is when its loads began."""

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
    """Return whether an order may overtake a batch that is only loading, as at a real worker."""
    match order:
        case plans.AdmitRequest() | plans.ExtendLease() | plans.PreemptRequest() | plans.AbortRequest():
            return order.request_id not in _named(loading)
        case _:
            return isinstance(order, plans.PromotePages)


def may_go_ahead(order: RunBatch, loading: RunBatch) -> bool:
    """Return whether a batch may be computed before an earlier one that is only loading.

    It may if it loads and restores nothing, and has no chunk of the other's requests.
    """
    is_alone = _named(loading).isdisjoint(chunk.request_id for chunk in order.chunks)
    return is_alone and not order.loads and not order.restores


def _named(batch: RunBatch) -> frozenset[str]:
    return frozenset([chunk.request_id for chunk in batch.chunks] + [load.request_id for load in batch.loads])
