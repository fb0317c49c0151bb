"""Workers that join and leave; requests that lost their worker resume from the tokens that their gateways have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.adapters import attach_all
from services.scheduler.core.cache.hotness.tracking import fit_pools
from services.scheduler.core.cache.page_pool import MOST_PAGES, new_pool
from services.scheduler.core.cache.residency import DEVICE, unlock_host
from services.scheduler.core.hidden.hidden_leases import drop_leases_of_worker
from services.scheduler.core.hidden.hidden_runs import drop_run
from services.scheduler.core.hidden.hidden_saves import drop_hidden_pool
from services.scheduler.core.kept_texts import KeptTexts
from services.scheduler.core.lifecycle import FAILURE_CODES, RequestEvent, RequestState, next_state
from services.scheduler.core.members.pools import (
    attach_worker,
    detach_worker,
    forget_host_copies,
    go_on_striking,
    request_missing_pools,
    strike,
)
from services.scheduler.core.queue.queueing import (
    MODEL_NOT_FOUND,
    accept,
    dequeue,
    enqueue,
    fail,
    fault_of,
    replace_waiting,
    take_waiting,
    unmatched,
)
from services.scheduler.core.restoring.fetches import abandon_fetches
from services.scheduler.core.state import CellState, Storage, Worker
from services.scheduler.core.tiers.backups import abandon_backups_of_storage, abandon_backups_of_worker
from services.scheduler.core.tiers.loads import attach_neighbours, copies_up, detach_neighbour
from services.scheduler.core.tiers.saves import abandon_saves_of_storage, abandon_saves_of_worker
from services.scheduler.core.waiting.waits import withdraw
from shared.errors import AttemptsExhausted, Unavailable
from shared.kept_texts import MOST_KEPT_TOKENS
from shared.messages.gateway_notices import RequestFailed, ResumeNeeded
from shared.messages.worker_plans import Dismiss
from shared.same_model import difference, have_equal_files

if TYPE_CHECKING:
    from services.scheduler.core.cache.prefix_tree import Node
    from services.scheduler.core.request import Request
    from services.scheduler.core.step import Step
    from shared.messages.requests import ReclaimRequest, ResumeRequest
    from shared.messages.worker_events import RestorationCosts, WorkerJoined


_LONGEST_US = 1e9
"""Bound of a profile's times (and of its link's bytes per µs): sums of larger values would end in infinity."""


def worker_joined(step: Step, message: WorkerJoined) -> None:
    """Let a worker in, or dismiss it. An older incarnation of it is lost by that.

    As long as nodes name the older one's pool, the worker waits (:func:`strike_more`): both pools have one name.
    """
    state = step.state
    known = state.workers.get(message.worker_id)
    waiting = state.arriving.get(message.worker_id)
    if any(other is not None and other.incarnation == message.incarnation for other in (known, waiting)):
        state.count("stale_inputs")
        return
    if known is not None:
        remove_worker(step, known)
    if f"{DEVICE}/{message.worker_id}" in state.lost:
        _let_wait(state, message)
        return
    state.arriving.pop(message.worker_id, None)
    fault = _fault(state, message)
    if fault:
        state.count("workers_dismissed")
        step.to_stranger(message.worker_id, message.incarnation, Dismiss(reason=fault))
        return
    if not _adopt_model(step, message):
        _let_wait(state, message)
        return
    worker = Worker(
        worker_id=message.worker_id,
        incarnation=message.incarnation,
        node=message.node,
        handle=message.pool,
        max_context=message.max_context,
        pool=new_pool(message.pool.pages),
        restoration=_profile(state, message),
        device=message.device,
        texts=KeptTexts(most_tokens=max(0, min(message.kept_tokens, MOST_KEPT_TOKENS))),
        takes_compact=message.takes_compact,
        reads_no_parts=message.reads_no_parts,
    )
    state.workers[worker.worker_id] = worker
    fit_pools(state)
    state.count("workers_joined")
    attach_worker(step, worker)
    if state.adapters:
        attach_all(step, worker)
    attach_neighbours(step)
    replace_waiting(step)


def _fault(state: CellState, message: WorkerJoined) -> str:
    """Return why a worker cannot serve in this cell, or ""."""
    geometry = message.pool.geometry
    if not 1 <= message.pool.pages <= MOST_PAGES or geometry.page_size < 1 or message.max_context < 1:
        return "the worker's pool or context is empty, or larger than can be numbered"
    if not state.workers:
        return ""
    if message.model != state.model:
        return difference("this worker", message.kernels, state.kernels) or "the cell serves another model"
    if geometry != state.geometry:
        return "the cell's pages have another geometry"
    return ""


def _profile(state: CellState, message: WorkerJoined) -> RestorationCosts | None:
    """Return the worker's costs of restoring; None for a profile with impossible values, which is counted."""
    profile = message.restoration
    if profile is None:
        return None
    times = (profile.hidden_us, profile.token_us, profile.pair_us, profile.link_bytes_per_us)
    if profile.hidden < 0 or not all(0.0 <= time <= _LONGEST_US for time in times) or not profile.token_us:
        state.count("malformed_inputs")
        return None
    return profile


def _let_wait(state: CellState, message: WorkerJoined) -> None:
    state.count("joins_put_off")
    state.arriving[message.worker_id] = message


def strike_more(step: Step) -> None:
    """Go on striking lost pools, and let in workers that waited for that."""
    state = step.state
    go_on_striking(step)
    request_missing_pools(step)
    for message in list(state.arriving.values()):
        if f"{DEVICE}/{message.worker_id}" not in state.lost:
            del state.arriving[message.worker_id]
            worker_joined(step, message)
    for worker_id in state.workers:
        step.touch(worker_id)


def arriving_left(step: Step, worker_id: str, incarnation: str) -> bool:
    """Remove a worker that waits to join; return whether it was one."""
    message = step.state.arriving.get(worker_id)
    if message is None or message.incarnation != incarnation:
        return False
    del step.state.arriving[worker_id]
    return True


def _adopt_model(step: Step, message: WorkerJoined) -> bool:
    """Adopt the model of the first worker. KV of another geometry is dropped.

    Return False while nodes with such KV are left, which are being struck.
    """
    state = step.state
    if state.workers:
        state.kernels = state.kernels or message.kernels
        return True
    if state.model == message.model and state.geometry == message.pool.geometry:
        state.kernels = message.kernels
        return True
    if state.model and state.model != message.model:
        # The prompts are tokens of another model, or the KV of their namespaces is of other kernels.
        has_its_files = have_equal_files(message.kernels, state.kernels)
        now = "computes by kernels of another release" if has_its_files else "serves another model"
        for request in list(state.requests.values()):
            if request.state is RequestState.WAITING:
                dequeue(state, request)
            fail(step, request, Unavailable.code, f"the cell {now} now")
    if state.geometry is not None and state.geometry != message.pool.geometry:
        forget_host_pools(step)
        if state.lost:
            return False
    state.model, state.kernels, state.geometry = message.model, message.kernels, message.pool.geometry
    state.tree.page_size = message.pool.geometry.page_size
    state.quotas.page_bytes = message.pool.geometry.page_bytes
    return True


def remove_worker(step: Step, worker: Worker, *, has_left: bool = False) -> None:
    """Remove a worker that is gone with its device pool: its cached pages vanish, its requests go on elsewhere.

    ``has_left``: it said so itself; otherwise it counts as lost.
    """
    state = step.state
    state.count("workers_left" if has_left else "workers_lost")
    waiting = take_waiting(state, worker)
    if worker.drain is not None:
        step.cancel_timer(worker.drain.timer_id)
    abandon_backups_of_worker(step, worker)
    abandon_saves_of_worker(state, worker)
    if state.leases:
        drop_leases_of_worker(step, worker)
    detach_neighbour(step, worker)
    reading = _host_copies_being_read(state, worker)
    for node, storage in reading:
        unlock_host(state, node, storage)
    del state.workers[worker.worker_id]
    strike(step, DEVICE, worker.worker_id)
    detach_worker(step, worker)
    for name in worker.work.running:
        worker_gone(step, state.requests[name])
    for request in waiting:
        enqueue(step, request)


def _host_copies_being_read(state: CellState, worker: Worker) -> list[tuple[Node, Storage]]:
    """Return the host locks of this worker's loads and promotion, lowest nodes first in each."""
    reading = []
    for storage_id, nodes in copies_up(state, worker):
        storage = state.storages.get(storage_id)
        if storage is not None:
            reading += [(node, storage) for node in nodes]
    return reading


def forget_host_pools(step: Step) -> None:
    """Forget every cached page: the cell's geometry changes while no worker is joined, and new pools are due."""
    state = step.state
    for storage in state.storages.values():
        abandon_backups_of_storage(step, storage)
        abandon_saves_of_storage(step, storage)
        abandon_fetches(step, storage, is_lost=False)
        drop_hidden_pool(step, storage)
        forget_host_copies(step, storage)
        storage.handle = storage.pool = None
        storage.is_pool_requested = False


RESUME_TIMEOUT_MS = 30_000
"""Wait for a gateway's answer: a live one answers within milliseconds, and a dead one is found out by then."""


def worker_gone(step: Step, request: Request) -> None:
    """Move on an admitted request that lost its worker and all its pages there: to resume, or to fail."""
    withdraw(step.state, request)
    if request.hidden.run is not None:
        drop_run(step.state, request)
    request.prefetch.kv = request.sparse.span = None
    request.pages, request.shared, request.node = b"", 0, 0
    request.planned = request.computed = 0
    request.worker_id = ""
    request.failures += 1
    if request.ending:
        fail(step, request, FAILURE_CODES[request.ending])
    elif request.failures >= step.state.config.max_attempts:
        fail(step, request, AttemptsExhausted.code, "the request's workers died too often")
    else:
        request.state = next_state(request.state, RequestEvent.WORKER_LOST)
        request.attempt += 1
        _ask_gateway(step, request)


def _ask_gateway(step: Step, request: Request) -> None:
    step.set_timer(request.resume_timer, "resume", request.request_id, RESUME_TIMEOUT_MS)
    step.state.count("resumes_needed")
    step.to_gateway(request.submit.gateway_id, ResumeNeeded(request_id=request.request_id, attempt=request.attempt))


def reclaim(step: Step, message: ReclaimRequest) -> None:
    """Reclaim a request that has ended here, whose end a gateway never heard because the worker is gone.

    No bound of the queue applies: the request was accepted once. A request that has not ended needs nothing, since its
    worker, or that worker's loss, will lead to a notice. A gateway that has heard the end meanwhile answers with a
    cancellation.
    """
    state, submit = step.state, message.submit
    if submit.request_id in state.requests or submit.base is not None or submit.compact or fault_of(submit):
        state.count("stale_inputs")
        return
    if submit.adapter and submit.adapter not in state.adapters:
        text = "the adapter that was asked for is not served any more"
        step.to_gateway(
            submit.gateway_id, RequestFailed(request_id=submit.request_id, code=MODEL_NOT_FOUND, message=text)
        )
        return
    state.count("requests_reclaimed")
    request = accept(step, submit, unmatched(submit))
    request.state = RequestState.RESUMING
    _ask_gateway(step, request)


def resume(step: Step, request: Request, message: ResumeRequest) -> None:
    """Resume behind the tokens that the gateway has; the next attempt repeats none of them and skips none.

    At least one token is left to sample: a gateway that has it drops the repeat, but needs the end that comes with it.
    """
    if request.state is not RequestState.RESUMING or message.attempt != request.attempt:
        step.state.count("stale_inputs")
        return
    step.cancel_timer(request.resume_timer)
    request.state = next_state(request.state, RequestEvent.RESUME)
    most = min(len(message.output) // 4, request.submit.sampling.max_tokens - 1)
    request.output = message.output[: most * 4]
    step.state.count("requests_resumed")
    enqueue(step, request)
