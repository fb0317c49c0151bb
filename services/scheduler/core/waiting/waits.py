"""Deferral on delay hit (Strata 4.3.1): requests wait, for a bounded time, for KV that another is about to bring.

A deferred request is out of its worker's ready order. It waits for a producer that is running or stands ahead of
it, for a load in flight, or for its fetch from below host memory (Strata 4.2); a producer is never
deferred itself (one that is wakes its waiters first), and loads and fetches wait for no request, so that
no requests can wait in a circle. It stands at the front again as soon as what both share is computed, the load or the
fetch is over, or the producer will not compute it any more. From its first deferral for another request on it has a
deadline; past it, it runs anyway and is not deferred again before it is admitted. A wait for a fetch has bounds of
its own (see :mod:`fetch_waits`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from services.scheduler.core.cache.residency import let_go_of_held
from services.scheduler.core.lifecycle import DEFERRED, RequestState, WaitEvent, WaitKind
from services.scheduler.core.waiting import transient
from services.scheduler.core.waiting.fair_share import stand_in_line, step_out
from shared.errors import InvariantViolated
from shared.messages import explanations

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from services.scheduler.core.cache.prefix_match import PrefixMatch
    from services.scheduler.core.request import Request
    from services.scheduler.core.state import CellState, Worker
    from services.scheduler.core.step import Step


@dataclass(frozen=True, slots=True)
class Aside:
    """The subject that a request should wait for, out of the ready order."""

    kind: WaitKind
    subject: str | int  # A producer's request id, a node that is being loaded, a fetch.
    needed: int = 0  # Tokens of the request that must be there before it goes on.
    spared: int = 0  # Tokens that it saves computing by waiting.


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """A row of :data:`REASONS`: how requests come to wait for something, and how that ends.

    A reason without ``find`` is found by modules above this one, which call :func:`defer`. Without ``wake``, the module
    that brings the subject wakes the requests. ``begin`` and ``end`` index the waiting requests. ``find`` and
    ``is_known`` change nothing.
    """

    counters: tuple[str, ...]  # Raised each time that a request is deferred for it.
    duration: Literal["deferral", "prefetch_wait"] = "deferral"  # Its name in explanations and counters.
    has_deadline: bool = True  # Bounded by ``defer_deadline_ms``; past it the request runs and is not looked at again.
    find: Callable[[CellState, Worker, Request, PrefixMatch, int, Mapping[str, None]], Aside | None] | None = None
    begin: Callable[[CellState, Worker, Request, Aside], None] | None = None
    end: Callable[[CellState, Worker, Request], None] | None = None
    wake: Callable[[CellState, Worker], None] | None = None
    is_known: Callable[
        [CellState, Worker, Request], bool
    ]  # Whether the request is indexed under its subject; for tests.


def find_aside(
    state: CellState,
    worker: Worker,
    request: Request,
    found: PrefixMatch,
    reach_tokens: int,
    ahead: Mapping[str, None],
) -> Aside | None:
    """Return what a request should wait for; None if it may run now. Changes nothing.

    ``found`` is the part that it can reuse, ``reach_tokens`` its end including a sparse prefix; ``ahead`` are waiting
    requests that would run before it.
    """
    if request.patience.is_over:
        return None
    for find in _FINDERS:
        aside = find(state, worker, request, found, reach_tokens, ahead)
        if aside is not None:
            return aside
    return None


def defer(step: Step, request: Request, worker: Worker, aside: Aside) -> None:
    """Defer a request: it waits for ``aside``, out of the ready order, within the reason's deadline."""
    state, reason = step.state, REASONS[aside.kind]
    if aside.spared:
        state.count("deferred_tokens", aside.spared)
    for name in reason.counters:
        state.count(name)
    if reason.begin is not None:
        reason.begin(state, worker, request, aside)
    withdraw(state, request)
    step_out(worker, request)
    worker.line.deferred[request.request_id] = aside.needed
    request.advance_wait(DEFERRED[aside.kind], aside.subject, step.time_ns)
    if reason.has_deadline and not request.patience.timer:
        timer_id = f"deferral.{request.accepted_seq}.{request.attempt}"
        delay_ms = max(1, state.config.defer_deadline_ms)
        request.patience.timer = step.set_timer(timer_id, "deferral", request.request_id, delay_ms)


def wake_due(state: CellState, worker: Worker) -> None:
    """Wake requests whose reason to wait is gone, for reasons that are checked before each batch."""
    for wake_those in _WAKERS:
        wake_those(state, worker)


def announce(state: CellState, request: Request, uncached: int) -> None:
    """Mark the tokens that a request at a worker is about to compute, if they are enough for others to wait for."""
    if request.place.marks:
        if uncached <= state.config.defer_tokens:
            withdraw(state, request)
        return
    page_size = state.tree.page_size
    is_worth_it = 0 < state.config.defer_tokens < uncached and request.token_count >= page_size
    if not is_worth_it or not request.submit.cache.write:
        return
    state.count("transient_spans")
    request.place.marks = transient.add_span(
        state.transient, page_size, request.worker_id, request.request_id, request.submit.namespace, request.tokens
    )


def withdraw(state: CellState, request: Request) -> None:
    """Remove the marks of a request that computes nothing more for others, and wake its waiters."""
    if request.place.marks:
        transient.remove_span(state.transient, request.worker_id, request.request_id, request.place.marks)
        request.place.marks = 0
    for name in list(state.waiters.get(request.request_id, ())):
        wake(state, state.requests[name])


def progressed(state: CellState, producer: Request) -> None:
    """Wake the waiters that share no more tokens with a producer than it has computed by now."""
    for name, needed in list(state.waiters.get(producer.request_id, {}).items()):
        if needed <= producer.computed:
            wake(state, state.requests[name])


def wake(state: CellState, request: Request) -> None:
    """End a request's deferral and put it at the front of the ready order."""
    end_deferral(state, request)
    request.advance_wait(WaitEvent.WOKEN)
    request.place.is_returned = True
    stand_in_line(state.workers[request.worker_id], request)


def end_deferral(state: CellState, request: Request) -> None:
    """Remove a request from the index of its deferral, and record the wait; the caller says what it waits for next."""
    worker, wait = state.workers[request.worker_id], request.wait
    del worker.line.deferred[request.request_id]
    waited_ms = max(0, state.now_ns - wait.since_ns) // 1_000_000
    reason = REASONS.get(wait.kind)
    if reason is None:
        raise InvariantViolated(f"{request.request_id} is not deferred")
    if state.recollection is not None:
        said = explanations.Wait(kind=reason.duration, start_ns=wait.since_ns, end_ns=state.now_ns)
        state.recollection.note_wait(request.request_id, said)
    if reason.end is not None:
        reason.end(state, worker, request)
    state.count(f"{reason.duration}_ms", waited_ms)


def expire_deferral(step: Step, request: Request) -> None:
    """End a deferral at its deadline: the request runs as soon as it can, and is not deferred again."""
    request.patience.timer = ""
    request.patience.is_over = True
    if request.wait.is_deferred:
        step.state.count("deferral_deadlines")
        wake(step.state, request)


def forget_deferral(step: Step, request: Request) -> None:
    """Clear the deadline and marks of deferral of a request that is admitted or over."""
    step.cancel_timer(request.patience.timer)
    request.patience.timer = ""
    request.patience.is_over = request.place.is_returned = False


def transient_nodes(state: CellState) -> tuple[int, int]:
    """Return the numbers of in-queue and of in-flight transient nodes. Changes nothing."""
    in_flight = 0
    for marks in state.transient.marks.values():
        producers = [name for names in marks.values() for name in names]
        in_flight += any(state.requests[name].state is RequestState.PREFILLING for name in producers)
    return len(state.transient.marks) - in_flight, in_flight


def _drop(waiters: dict[Any, dict[str, int]], key: str | int, name: str) -> None:
    del waiters[key][name]
    if not waiters[key]:
        del waiters[key]


def end_fetch_wait(step: Step, request: Request) -> None:
    """Cancel the timer that bounds a request's wait for a fetch."""
    step.cancel_timer(request.patience.fetch_timer)
    request.patience.fetch_timer = ""


def forget_fetch_waits(step: Step, request: Request) -> None:
    """Clear the bounds of waits for fetches of a request that is admitted or over."""
    end_fetch_wait(step, request)
    request.patience.is_fetch_over, request.patience.fetch_since_ns, request.prefetch.follows = False, 0, 0


def count_waiting(state: CellState, request: Request, change: int) -> None:
    """Add ``change`` (1 or -1) requests like this to the counts of the queue and of its tenant."""
    state.queued += change
    state.queued_tokens += change * request.token_count
    tenant = request.submit.tenant
    waiting = state.tenants.get(tenant, 0) + change
    if waiting:
        state.tenants[tenant] = waiting
    else:
        del state.tenants[tenant]


def let_go_of_fetch(state: CellState, request: Request) -> None:
    """Release a request from its fetch and held copies; a fetch without waiters is cancelled at the step's end."""
    if request.prefetch.is_due or request.prefetch.brought_to or request.prefetch.counted >= 0:
        for storage in state.storages.values():
            storage.fetching.due.pop(request.request_id, None)
            is_roomier = let_go_of_held(state, storage, request.request_id)
            is_roomier |= storage.fetching.ahead.pop(request.request_id, 0) > 0
            if is_roomier and storage.fetching.due:
                state.roomy[storage.storage_id] = None
    request.prefetch.counted, request.prefetch.is_again = -1, False
    request.prefetch.is_due = request.prefetch.looks_again = False
    fetch = state.fetches.get(request.prefetch.fetch)
    request.prefetch.fetch = request.prefetch.end = 0
    if fetch is not None:
        del fetch.waiters[request.request_id]
        if not fetch.waiters and not fetch.is_called_off:
            state.unwanted[fetch.fetch_id] = None


def _find_load(
    _state: CellState,
    _worker: Worker,
    _request: Request,
    found: PrefixMatch,
    _reach_tokens: int,
    _ahead: Mapping[str, None],
) -> Aside | None:
    """Return the node that is being loaded right below the request's reusable prefix, if any."""
    return None if found.awaited is None else Aside(WaitKind.LOAD, found.awaited.id)


def _wake_for_loads(state: CellState, worker: Worker) -> None:
    for node_id in list(worker.line.load_waiters):
        node = state.tree.nodes.get(node_id)
        if node is None or worker.worker_id not in node.loading:
            for name in list(worker.line.load_waiters[node_id]):
                wake(state, state.requests[name])


def _find_producer(
    state: CellState,
    worker: Worker,
    request: Request,
    found: PrefixMatch,
    reach_tokens: int,
    ahead: Mapping[str, None],
) -> Aside | None:
    """Return a producer of more than ``defer_tokens`` tokens that the request would compute itself, if any."""
    threshold = state.config.defer_tokens
    if threshold <= 0 or not request.may_reuse:
        return None
    page_size = state.tree.page_size
    max_pages = (request.token_count - 1) // page_size
    path = transient.match(state.transient, request.submit.namespace, request.tokens, max_pages)
    end = sum(pages for _, pages in path) * page_size
    for node, pages in reversed(path):
        if end - reach_tokens <= threshold:
            return None
        for name in state.transient.marks[node.id].get(worker.worker_id, ()):
            producer = state.requests[name]
            is_coming = producer.state is RequestState.PREFILLING or name in ahead
            if producer is not request and is_coming and end - max(reach_tokens, producer.computed) > threshold:
                return Aside(WaitKind.PRODUCER, name, end, end - found.pages * page_size)
        end -= pages * page_size
    return None


def _begin_with_producer(state: CellState, _worker: Worker, request: Request, aside: Aside) -> None:
    state.waiters.setdefault(str(aside.subject), {})[request.request_id] = aside.needed


def _begin_with_load(_state: CellState, worker: Worker, request: Request, aside: Aside) -> None:
    worker.line.load_waiters.setdefault(int(aside.subject), {})[request.request_id] = 0


_FOR_A_FETCH = Reason(
    counters=("prefetch_waits",),
    duration="prefetch_wait",
    has_deadline=False,  # It has bounds of its own: ``restoring.fetch_waits``.
    is_known=lambda _state, _worker, request: not request.patience.is_fetch_over,
)

REASONS: dict[WaitKind, Reason] = {
    WaitKind.LOAD: Reason(
        counters=("delay_hits_deferred", "requests_deferred"),
        find=_find_load,
        begin=_begin_with_load,
        end=lambda _state, worker, request: _drop(worker.line.load_waiters, request.wait.node, request.request_id),
        wake=_wake_for_loads,
        is_known=lambda _state, worker, request: (
            request.request_id in worker.line.load_waiters.get(request.wait.node, {})
        ),
    ),
    WaitKind.PRODUCER: Reason(
        counters=("requests_deferred",),
        find=_find_producer,
        begin=_begin_with_producer,
        end=lambda state, _worker, request: _drop(state.waiters, request.wait.producer, request.request_id),
        is_known=lambda state, _worker, request: request.request_id in state.waiters.get(request.wait.producer, {}),
    ),
    WaitKind.FETCH: _FOR_A_FETCH,
    WaitKind.RUN: _FOR_A_FETCH,
}
"""Every kind of deferral, in the order of look-up."""

_FINDERS = tuple(reason.find for reason in REASONS.values() if reason.find is not None)
_WAKERS = tuple(reason.wake for reason in REASONS.values() if reason.wake is not None)
