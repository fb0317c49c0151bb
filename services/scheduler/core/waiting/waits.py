"""Deferral on delay hit (Strata 4.3.1): who waits for KV that another is about to bring, and for how long.

A deferred request is out of its worker's ready order. It waits for a producer that is running or stands ahead of
it, for a load under way, or for what is fetched for it from below host memory (Strata 4.2); a producer is never
deferred itself (one that becomes so lets go of its waiters), and loads and fetches wait for no request, so that
nobody can wait in a circle. It stands at the front again as soon as what both share is computed, the load or the
fetch is over, or the producer is not going to bring it any more. From its first deferral for another on it has a
deadline; past it, it runs anyway and is not deferred again before it is admitted. A wait for a fetch has bounds of
its own (see :mod:`fetch_waits`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, assert_never

from services.scheduler.core.lifecycle import RequestState, WaitEvent, WaitKind
from services.scheduler.core.waiting import transient
from services.scheduler.core.waiting.fair_share import stand_in_line, step_out
from shared.errors import InvariantViolated
from shared.messages import explanations

if TYPE_CHECKING:
    from collections.abc import Mapping

    from services.scheduler.core.cache.prefix_tree import Node
    from services.scheduler.core.request import Request
    from services.scheduler.core.state import CellState, Worker
    from services.scheduler.core.step import Step


def find_producer(
    state: CellState, request: Request, worker: Worker, reach_tokens: int, ahead: Mapping[str, None]
) -> tuple[str, int] | None:
    """Whom a request should wait for and until how many tokens of it are computed; None if for nobody.

    ``reach_tokens`` is what the request can reuse now; ``ahead`` are waiting requests that would run before it.
    Does not mutate.
    """
    threshold = state.config.defer_tokens
    if threshold <= 0 or request.patience.is_over or not request.may_reuse:
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
                return name, end
        end -= pages * page_size
    return None


def announce(state: CellState, request: Request, uncached: int) -> None:
    """Mark what a request at a worker is about to compute, if it is enough for others to wait for."""
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
    """A request is about to compute nothing more that others could use: its marks go, and nobody waits for it."""
    if request.place.marks:
        transient.remove_span(state.transient, request.worker_id, request.request_id, request.place.marks)
        request.place.marks = 0
    for name in list(state.waiters.get(request.request_id, ())):
        wake(state, state.requests[name])


def progressed(state: CellState, producer: Request) -> None:
    """A producer has computed more: those who share no more than that with it need wait no longer."""
    for name, needed in list(state.waiters.get(producer.request_id, {}).items()):
        if needed <= producer.computed:
            wake(state, state.requests[name])


def defer_for_producer(step: Step, request: Request, worker: Worker, producer: str, needed: int, spared: int) -> None:
    """Let a request wait until ``producer`` has computed its first ``needed`` tokens, which spares it ``spared``."""
    state = step.state
    state.count("deferred_tokens", spared)
    state.waiters.setdefault(producer, {})[request.request_id] = needed
    _defer(step, request, worker, WaitEvent.FOR_PRODUCER, producer, needed)


def defer_for_load(step: Step, request: Request, worker: Worker, node: Node) -> None:
    """Let a request wait until ``node`` is not being loaded any more."""
    step.state.count("delay_hits_deferred")
    worker.line.load_waiters.setdefault(node.id, {})[request.request_id] = 0
    _defer(step, request, worker, WaitEvent.FOR_LOAD, node.id, 0)


def defer_for_fetch(step: Step, request: Request, worker: Worker, fetch_id: int) -> None:
    """Let a request wait until a fetch of KV is over or has brought what it can for it."""
    step.state.count("prefetch_waits")
    _step_aside(step, request, worker, WaitEvent.FOR_FETCH, fetch_id, 0)


def defer_for_run(step: Step, request: Request, worker: Worker, fetch_id: int) -> None:
    """Let a request wait until a part of what a fetch of hidden states brings is there."""
    step.state.count("prefetch_waits")
    _step_aside(step, request, worker, WaitEvent.FOR_RUN, fetch_id, 0)


def wake_load_waiters(state: CellState, worker: Worker) -> None:
    """Let everybody go on whose load is over."""
    for node_id in list(worker.line.load_waiters):
        node = state.tree.nodes.get(node_id)
        if node is None or worker.worker_id not in node.loading:
            for name in list(worker.line.load_waiters[node_id]):
                wake(state, state.requests[name])


def wake(state: CellState, request: Request) -> None:
    """A deferred request stands at the front again."""
    end_deferral(state, request)
    request.advance_wait(WaitEvent.WOKEN)
    request.place.is_returned = True
    stand_in_line(state.workers[request.worker_id], request)


def end_deferral(state: CellState, request: Request) -> None:
    """A deferred request is expected back by nothing any more; the caller says what it waits for instead."""
    worker, wait = state.workers[request.worker_id], request.wait
    del worker.line.deferred[request.request_id]
    waited_ms = max(0, state.now_ns - wait.since_ns) // 1_000_000
    kind: Literal["deferral", "prefetch_wait"] = "prefetch_wait" if wait.fetch else "deferral"
    if state.recollection is not None:
        said = explanations.Wait(kind=kind, start_ns=wait.since_ns, end_ns=state.now_ns)
        state.recollection.note_wait(request.request_id, said)
    match wait.kind:
        case WaitKind.PRODUCER:
            _drop(state.waiters, wait.producer, request.request_id)
        case WaitKind.LOAD:
            _drop(worker.line.load_waiters, wait.node, request.request_id)
        case WaitKind.FETCH | WaitKind.RUN:
            pass  # A fetch asks those that it is for whether they wait.
        case WaitKind.NOWHERE | WaitKind.TURN:
            raise InvariantViolated(f"{request.request_id} is not deferred")
        case _:
            assert_never(wait.kind)
    state.count("prefetch_wait_ms" if wait.fetch else "deferral_ms", waited_ms)


def expire_deferral(step: Step, request: Request) -> None:
    """The deadline passed: the request runs as soon as it can, whatever others bring."""
    request.patience.timer = ""
    request.patience.is_over = True
    if request.wait.is_deferred:
        step.state.count("deferral_deadlines")
        wake(step.state, request)


def forget_deferral(step: Step, request: Request) -> None:
    """A request is admitted or over: what it waited is past."""
    step.cancel_timer(request.patience.timer)
    request.patience.timer = ""
    request.patience.is_over = request.place.is_returned = False


def transient_nodes(state: CellState) -> tuple[int, int]:
    """How many transient nodes are in-queue and how many in-flight. Does not mutate."""
    in_flight = 0
    for marks in state.transient.marks.values():
        producers = [name for names in marks.values() for name in names]
        in_flight += any(state.requests[name].state is RequestState.PREFILLING for name in producers)
    return len(state.transient.marks) - in_flight, in_flight


def _defer(step: Step, request: Request, worker: Worker, event: WaitEvent, subject: str | int, needed: int) -> None:
    state = step.state
    state.count("requests_deferred")
    _step_aside(step, request, worker, event, subject, needed)
    if not request.patience.timer:
        timer_id = f"deferral.{request.accepted_seq}.{request.attempt}"
        delay_ms = max(1, state.config.defer_deadline_ms)
        request.patience.timer = step.set_timer(timer_id, "deferral", request.request_id, delay_ms)


def _step_aside(
    step: Step, request: Request, worker: Worker, event: WaitEvent, subject: str | int, needed: int
) -> None:
    withdraw(step.state, request)
    step_out(worker, request)
    worker.line.deferred[request.request_id] = needed
    request.advance_wait(event, subject, step.time_ns)


def _drop(waiters: dict[Any, dict[str, int]], key: str | int, name: str) -> None:
    del waiters[key][name]
    if not waiters[key]:
        del waiters[key]


def end_fetch_wait(step: Step, request: Request) -> None:
    """Nothing bounds the wait of a request any more: what it waited for is over, or it is not going to wait."""
    step.cancel_timer(request.patience.fetch_timer)
    request.patience.fetch_timer = ""


def forget_fetch_waits(step: Step, request: Request) -> None:
    """A request is admitted or over: what it waited for fetches is past."""
    end_fetch_wait(step, request)
    request.patience.is_fetch_over, request.patience.fetch_since_ns, request.prefetch.follows = False, 0, 0


def count_waiting(state: CellState, request: Request, change: int) -> None:
    state.queued += change
    state.queued_tokens += change * request.token_count
    tenant = request.submit.tenant
    waiting = state.tenants.get(tenant, 0) + change
    if waiting:
        state.tenants[tenant] = waiting
    else:
        del state.tenants[tenant]


def let_go_of_fetch(state: CellState, request: Request) -> None:
    """A request waits for nothing to be fetched any more; a fetch that nobody waits for then ends with the step."""
    if request.prefetch.is_due or request.prefetch.brought_to:
        for storage in state.storages.values():
            storage.fetching.due.pop(request.request_id, None)
            if storage.fetching.ahead.pop(request.request_id, 0) and storage.fetching.due:
                state.roomy[storage.storage_id] = None
    request.prefetch.is_due = False
    fetch = state.fetches.get(request.prefetch.fetch)
    request.prefetch.fetch = request.prefetch.end = 0
    if fetch is not None:
        del fetch.waiters[request.request_id]
        if not fetch.waiters and not fetch.is_called_off:
            state.unwanted[fetch.fetch_id] = None
