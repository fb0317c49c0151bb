"""How long a request that could run waits for its fetch (Strata 4.2; ``prefetch_wait``).

``best_effort`` never waits: chunks that have not arrived when the request is admitted are cut off and recomputed.
``full`` waits until the fetch is over, which its deadline bounds. ``deadline`` waits for ``prefetch_deadline_ms`` at
most, and no longer than recomputing the missing chunks would take: waiting longer never pays. Requests wait for hidden
states until the first part has arrived, for the rest is restored as it comes (:mod:`restorations`). Where their end is
not known, because the object store was asked, requests wait until it is: behind it begins what is saved of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.hidden.hidden_runs import drop_run, is_unanswered
from services.scheduler.core.lifecycle import WaitKind
from services.scheduler.core.rates import has_compute_speed, recompute_us
from services.scheduler.core.restoring.prefetch import prefetch
from services.scheduler.core.waiting.waits import Aside, defer, end_fetch_wait, let_go_of_fetch, wake

if TYPE_CHECKING:
    from services.scheduler.core.hidden.hidden_in_flight import HiddenRun
    from services.scheduler.core.request import Request
    from services.scheduler.core.state import Worker
    from services.scheduler.core.step import Step


def waits_for_fetch(step: Step, request: Request, worker: Worker, cached: int) -> bool:
    """Defer a request that would run now, if its fetch is worth waiting for; return whether it was deferred.

    ``cached`` tokens of it need not be computed already. A fetch that found no room before is tried once more.
    """
    if request.prefetch.is_due or request.prefetch.looks_again or request.prefetch.follows:
        request.prefetch.follows = 0
        prefetch(step, request, is_next=True)
    if request.hidden.run is not None:
        return _waits_for_run(step, request, worker, request.hidden.run, cached)
    if request.prefetch.follows:
        return _waits_for_other(step, request, worker, cached)
    if not request.prefetch.fetch:
        return False
    if cached >= request.prefetch.end:
        let_go_of_fetch(step.state, request)  # Another fetch was faster.
        request.prefetch.counted = cached
        return False
    if not _may_wait(step, request, worker, cached, request.prefetch.end):
        return False
    defer(step, request, worker, Aside(WaitKind.FETCH, request.prefetch.fetch))
    return True


def _waits_for_run(step: Step, request: Request, worker: Worker, run: HiddenRun, cached: int) -> bool:
    """Return the same for hidden states: the request waits until the first part has arrived.

    A run that is useless by now, because KV above it was evicted or the wait is over, is dropped.
    """
    is_there = run.depth <= cached < run.arrived
    if is_there and not is_unanswered(run):
        return False
    is_coming = run.depth <= cached < run.end and run.fetch
    if is_coming and _may_wait(step, request, worker, cached, run.end):
        defer(step, request, worker, Aside(WaitKind.RUN, run.fetch))
        return True
    end_fetch_wait(step, request)
    if not is_there:
        drop_run(step.state, request)
    return False


def _waits_for_other(step: Step, request: Request, worker: Worker, cached: int) -> bool:
    """Return the same for hidden states that are fetched for another request, which will restore them sooner.

    The request waits until the other one can be admitted. From then on that is a producer like any other.
    """
    state = step.state
    fetch = state.hidden_fetches[request.prefetch.follows]
    run = state.requests[fetch.request_id].hidden.run
    is_coming = run is not None and (run.arrived <= cached or is_unanswered(run)) and cached < run.end
    if run is None or not is_coming or not _may_wait(step, request, worker, cached, run.end):
        return False
    fetch.followers[request.request_id] = None
    defer(step, request, worker, Aside(WaitKind.RUN, fetch.fetch_id))
    return True


def _may_wait(step: Step, request: Request, worker: Worker, cached: int, end: int) -> bool:
    """Return whether a request may wait for a fetch up to ``end`` tokens; sets the bound of the wait, if any."""
    wait = step.state.config.prefetch_wait
    if wait == "best_effort" or request.patience.is_over or request.patience.is_fetch_over:
        return False
    return wait != "deadline" or _set_deadline(step, request, worker, cached, end)


def _set_deadline(step: Step, request: Request, worker: Worker, cached: int, end: int) -> bool:
    """Bound the wait; return False if no time is left."""
    state = step.state
    request.patience.fetch_since_ns = request.patience.fetch_since_ns or step.time_ns
    left_ms = state.config.prefetch_deadline_ms - (step.time_ns - request.patience.fetch_since_ns) // 1_000_000
    if has_compute_speed(state, worker):
        left_ms = min(left_ms, round(recompute_us(state, worker, cached, end - cached) / 1000))
    if left_ms < 1:
        return False
    timer_id = f"prefetch.{request.accepted_seq}.{request.attempt}"
    request.patience.fetch_timer = step.set_timer(timer_id, "prefetch", request.request_id, left_ms)
    return True


def expire_fetch_wait(step: Step, request: Request) -> None:
    """End the wait: the request runs as soon as it can, with what has arrived by then."""
    request.patience.fetch_timer = ""
    request.patience.is_fetch_over = True
    if request.wait.fetch:
        step.state.count("prefetch_deadlines")
        wake(step.state, request)
