"""Bubble filling (Strata 4.3.3): while the loads of a loading-bound batch run, the worker computes something else.

When the chunks of a batch begin, attention at layer l waits for the load of layer l, and all the requests that
decode beside them wait too. So the batch is held back while decode steps run, until what remains of the load would
hardly stall it. A whole batch behind it that loads nothing may be computed meanwhile as well, where the scheduler
allows that and the rest of the load takes longer than the batch. Every step of a bubble is a whole step of its
own: tokens are those of any other order of steps, because sampling is a pure function of seed, position and logits.

A bubble ends by itself: when the load has ended, when there is nothing to compute, or when a layer is overdue.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeGuard

import numpy as np
import numpy.typing as npt

from services.worker.kv.layer_gate import LayerGate
from services.worker.kv.loads import Progress
from services.worker.requests import RunningRequest
from shared.messages.worker_plans import (
    AbortRequest,
    AdmitRequest,
    ExtendLease,
    PageLoad,
    PreemptRequest,
    PrefillChunk,
    PromotePages,
    RestoreChunk,
    RunBatch,
    WorkerOrder,
)

SMOOTHING = 0.25
"""Weight of the newest measurement in a smoothed mean, which follows the machine's load within a few steps."""


@dataclass(slots=True)
class Pace:
    """Measured times on this worker in ns, as smoothed means; 0.0 is not known yet."""

    row_ns: float = 0.0  # One row (token) of a step with chunks, without its stall.
    page_ns: float = 0.0  # Loading one page in one layer.
    decode_ns: float = 0.0  # One step without chunks.

    def note_step(self, rows: int, took_ns: int) -> None:
        """Note a step with chunks that computed ``rows`` rows."""
        if rows and took_ns > 0:
            self.row_ns = _smoothed(self.row_ns, took_ns / rows)

    def note_load(self, pages: int, layers: int, took_ns: int) -> None:
        """Note a batch whose loads all succeeded."""
        if pages and took_ns > 0:
            self.page_ns = _smoothed(self.page_ns, took_ns / (pages * layers))

    def note_decode(self, took_ns: int) -> None:
        """Note a step that only decoded."""
        if took_ns > 0:
            self.decode_ns = _smoothed(self.decode_ns, took_ns)


@dataclass(slots=True)
class Bubble:
    """Contents of one bubble: the wall time of its decode steps and the tokens that they computed."""

    ns: int = 0
    tokens: int = 0


class Transfer(Protocol):
    """The part of ``kv.loads.BatchTransfer`` that a bubble uses."""

    gate: LayerGate

    @property
    def progress(self) -> Progress:
        """How far the batch's loads are, at the time of the call."""


def fill(
    transfer: Transfer,
    rows: int,
    pace: Pace,
    decode: Callable[[], int],
    clock_ns: Callable[[], int],
    prefill: Callable[[float], bool] | None = None,
) -> Bubble:
    """Compute other work until the batch's chunks, which have ``rows`` rows, should begin.

    ``decode`` runs one step and returns how many tokens it computed. ``prefill`` runs another batch if one is there
    that takes no longer than the given ns, and returns whether it did; it goes first.
    """
    bubble = Bubble()
    while not should_start(progress := transfer.progress, rows, pace) and not transfer.gate.expire():
        room_ns = float("inf") if progress.is_rejected else stall_ns(progress, rows, pace)
        if prefill is not None and prefill(room_ns):
            continue
        before_ns = clock_ns()
        tokens = decode()
        if not tokens:
            break
        took_ns = max(0, clock_ns() - before_ns)
        bubble.ns += took_ns
        bubble.tokens += tokens
    return bubble


def should_start(progress: Progress, rows: int, pace: Pace) -> bool:
    """Return whether chunks of ``rows`` rows should be computed now rather than after another decode step.

    They should when they would be stalled for no longer than a decode step takes: that step would delay them by more
    than it saves, so the bound errs towards starting. After a failed load the pass would be thrown away; then it is
    best to decode until nothing is being written any more.
    """
    if progress.has_ended:
        return True
    return not progress.is_rejected and stall_ns(progress, rows, pace) <= pace.decode_ns


def stall_ns(progress: Progress, rows: int, pace: Pace) -> float:
    """Predict how long chunks of ``rows`` rows would wait at the gate if they began now, in ns.

    The load goes on at the pace of its layers so far (before the first, at that of earlier loads), and computation
    takes the same time in each layer. Layer l lands in ``(l + 1 - released) * load - since`` and is wanted in ``l *
    compute``. The difference is linear in l, so it is greatest at the first or at the last layer that is not there yet.
    Infinite while nothing is known of the load.
    """
    load = progress.released_after_ns / progress.released if progress.released else progress.pages * pace.page_ns
    if not load:
        return 0.0 if progress.released else float("inf")
    compute = rows * pace.row_ns / progress.layers
    first, last = progress.released, progress.layers - 1
    if first > last:
        return 0.0
    # A layer that is late is expected any moment, not in the past.
    next_ns = max(0.0, load - progress.since_ns)
    return max(0.0, *(next_ns + (layer - first) * load - layer * compute for layer in (first, last)))


def may_overtake(order: WorkerOrder, batch: RunBatch) -> bool:
    """Return whether an order behind ``batch`` may be carried out while the batch is still loading.

    Pages are no obstacle: the scheduler gives a page to another request only after its holder has answered, and this
    batch has not. What matters is the order of what happens to one request, so orders for requests of the batch wait
    for it. Another batch is a barrier unless it :func:`may_go_ahead`, and a host pool may not be detached while loads
    read it. A promotion writes pages that no request has, behind the loads.
    """
    match order:
        case AdmitRequest() | ExtendLease() | PreemptRequest() | AbortRequest():
            return order.request_id not in _named(batch)
        case PromotePages():
            return True
        case _:
            return False


def may_go_ahead(
    order: WorkerOrder, batch: RunBatch, requests: Mapping[str, RunningRequest], loading: Collection[int]
) -> TypeGuard[RunBatch]:
    """Return whether an order is a batch that may be computed while ``batch`` loads the ``loading`` pages.

    It may if it loads and restores nothing, and no chunk is of a request of the other batch or of one that stands on
    the pages being loaded.
    """
    if not batch.bubble_prefill or not isinstance(order, RunBatch) or order.loads or order.restores:
        return False
    names = [chunk.request_id for chunk in order.chunks]
    held = _packed(loading)
    stands = any(_stands_on(requests[name], held) for name in names if name in requests)
    return not stands and _named(batch).isdisjoint(names)


def fits(rows: int, room_ns: float, pace: Pace) -> bool:
    """Return whether a step of ``rows`` rows is predicted to end within ``room_ns``."""
    return rows * pace.row_ns <= room_ns


def standing_on(requests: Iterable[RunningRequest], loading: Collection[int]) -> frozenset[str]:
    """Return the ids of decoding requests whose page table has a page that is being loaded.

    Such a plan contradicts itself, and is no reason to read a page that is half written.
    """
    held = _packed(loading)
    return frozenset(each.request_id for each in requests if each.is_decoding and _stands_on(each, held))


def _stands_on(request: RunningRequest, pages: npt.NDArray[np.int32]) -> bool:
    return bool(np.isin(request.pages_held, pages).any())


def _packed(pages: Collection[int]) -> npt.NDArray[np.int32]:
    return np.fromiter(pages, dtype=np.int32, count=len(pages))


def _named(batch: RunBatch) -> frozenset[str]:
    parts: tuple[PrefillChunk | PageLoad | RestoreChunk, ...] = (*batch.chunks, *batch.loads, *batch.restores)
    return frozenset(part.request_id for part in parts)


def _smoothed(mean: float, value: float) -> float:
    return value if not mean else mean + SMOOTHING * (value - mean)
