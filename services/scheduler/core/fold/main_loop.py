"""The fold: one input in, outputs out, and all that a step does in between."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.adapters import go_on_replacing
from services.scheduler.core.cache.eviction_orders import prepare
from services.scheduler.core.fold.machine import HANDLERS, LOCAL
from services.scheduler.core.fold.timers import timer_fired
from services.scheduler.core.members.draining import go_on_draining
from services.scheduler.core.members.handover import go_on_handing_on
from services.scheduler.core.members.pools import keep_striking
from services.scheduler.core.queue.batching import send_batches
from services.scheduler.core.queue.leases import serve_leases
from services.scheduler.core.queue.queueing import steal
from services.scheduler.core.restoring.fetches import cancel_unwanted
from services.scheduler.core.restoring.prefetch import begin_due
from services.scheduler.core.step import Output, SetTimer, Stamped, Step
from services.scheduler.core.tiers.making_room import keep_quotas, keep_reserve
from services.scheduler.core.tiers.promotion import promote
from services.scheduler.core.tiers.writes import copy_at_rest
from services.scheduler.core.waiting.waits import wake_due
from shared.messages.cell_events import TimerFired

if TYPE_CHECKING:
    from services.scheduler.core.state import CellState, Worker


def step(state: CellState, stamped: Stamped) -> list[Output]:
    """Fold one input into ``state`` (in place) and return its outputs.

    Never raises for a stale, repeated or senseless input: it is counted and ignored. InvariantViolated and
    IllegalTransition mean a fault of the core itself.
    """
    if stamped.seq <= state.last_seq:
        state.count("stale_inputs")
        return []
    state.last_seq, state.now_ns = stamped.seq, stamped.time_ns
    taken = Step(state, stamped.seq, stamped.time_ns)
    if state.retired:
        state.retired.pop()  # One for each input: freeing a large policy takes tens of milliseconds.
    kind = type(stamped.input)
    if isinstance(stamped.input, TimerFired):
        timer_fired(taken, stamped.input.timer_id)
    else:
        HANDLERS[kind](taken, stamped.input)
    if state.replacements:
        go_on_replacing(taken)
    _serve_workers(taken, everywhere=kind not in LOCAL)
    if state.lost:
        keep_striking(taken)
    if state.handing:
        go_on_handing_on(taken)
    if state.unwanted:
        cancel_unwanted(taken)
    if state.roomy:
        begin_due(taken)
    return taken.outputs


def pending_timers(state: CellState) -> list[SetTimer]:
    """Return a SetTimer for every timer in the state, which a shell must keep after recovery."""
    return [SetTimer(timer_id, timer.at_ns) for timer_id, timer in state.timers.items()]


def _serve_workers(step: Step, *, everywhere: bool) -> None:
    """Give workers what they can take now; then let idle workers take over requests that others have no time for.

    Unless ``everywhere``, only workers that the step touched are served.
    """
    workers = step.state.workers
    is_busy = everywhere
    served = None
    for name in list(workers if everywhere else step.touched):
        if name in workers:
            served = workers[name]
            is_busy |= _serve(step, served)
    if step.state.queued and len(workers) > 1:
        for worker in steal(step):
            is_busy |= _serve(step, worker)
    if served is not None and not is_busy:
        prepare(step.state, served.worker_id, step.state.storage_id_of(served))


def _serve(step: Step, worker: Worker) -> bool:
    """Serve leases, batches, room ahead of need, and copies at rest; return whether that was much for one step."""
    state, drain = step.state, worker.drain
    if drain is not None and drain.is_over:
        return False
    if worker.lease_waits:
        serve_leases(step, worker)
    if worker.line.deferred:
        wake_due(state, worker)
    admissions = state.admissions
    is_batch_sent = send_batches(step, worker)
    if drain is not None:  # No new request comes that would need room or promotions.
        return go_on_draining(step, worker) or is_batch_sent
    is_evicting = False
    if state.storages:
        is_evicting = keep_reserve(step, worker, is_busy=is_batch_sent, admissions=state.admissions - admissions)
    is_trimming = bool(state.quotas.above) and keep_quotas(step, worker, is_busy=is_batch_sent)
    # A promotion put off here stays due for the worker's next input: the step has done enough. Promoted pages displace
    # pages within quotas, so those above a quota are evicted before.
    if worker.moves.is_promotion_due and not is_batch_sent and not is_trimming:
        promote(step, worker)
    is_copying = bool(worker.moves.uncopied) and not is_batch_sent and copy_at_rest(step, worker)
    return is_batch_sent or is_evicting or is_trimming or is_copying
