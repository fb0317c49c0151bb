"""Handlers of all kinds of inputs but timers.

This file only turns away what is stale, and cleans up behind an input that is left out of the fold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from services.scheduler.core import adapters
from services.scheduler.core.cache.pins import pin_prefix, unpin_prefix
from services.scheduler.core.fold.configure import configure, flush
from services.scheduler.core.hidden.hidden_leases import hidden_saved
from services.scheduler.core.hidden.hidden_saves import finish_hidden_save, request_hidden_pool
from services.scheduler.core.lifecycle import ADMITTED
from services.scheduler.core.members.draining import MOST_GRACE_MS, begin_drain
from services.scheduler.core.members.handover import begin_handing_on
from services.scheduler.core.members.membership import arriving_left, reclaim, remove_worker, resume, worker_joined
from services.scheduler.core.members.pools import request_missing_pools
from services.scheduler.core.members.storages import host_pool_created, remove_storage, storage_joined
from services.scheduler.core.queue.completion import (
    batch_done,
    cancel_gateway,
    end_early,
    request_finished,
    request_preempted,
    text_missing,
)
from services.scheduler.core.queue.leases import request_lease
from services.scheduler.core.queue.queueing import place_unplaced, submit
from services.scheduler.core.restoring.fetches import chunks_fetched
from services.scheduler.core.state import MOST_QUARANTINED, Quarantined
from services.scheduler.core.tiers.backups import finish_backup
from services.scheduler.core.tiers.catalogue import chunks_added, chunks_gone
from services.scheduler.core.tiers.loads import attach_neighbours
from services.scheduler.core.tiers.promotion import pages_promoted
from services.scheduler.core.tiers.saves import finish_save, save_put_off
from shared.errors import InternalError
from shared.messages import cell_events, requests, storage_events, worker_events
from shared.messages.gateway_notices import RequestFailed
from shared.messages.worker_plans import LeaveCell

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.scheduler.core.request import Request
    from services.scheduler.core.state import Storage, Worker
    from services.scheduler.core.step import Step


def _stale(step: Step) -> None:
    step.state.count("stale_inputs")


def _worker(step: Step, worker_id: str, incarnation: str) -> Worker | None:
    worker = step.state.workers.get(worker_id)
    if worker is not None and worker.incarnation == incarnation:
        step.touch(worker_id)
        return worker
    _stale(step)
    return None


def _of_worker(handle: Callable[[Step, Worker, Any], None]) -> Callable[[Step, Any], None]:
    """Return the handler of what workers say; a word of an incarnation that is no member is stale."""

    def handler(step: Step, message: Any) -> None:
        worker = _worker(step, message.worker_id, message.incarnation)
        if worker is not None:
            handle(step, worker, message)

    return handler


def _of_storage(handle: Callable[[Step, Storage, Any], None]) -> Callable[[Step, Any], None]:
    """Return the handler of what storages say; a word of an incarnation that is no member is stale."""

    def handler(step: Step, message: Any) -> None:
        storage = step.state.storages.get(message.storage_id)
        if storage is not None and storage.incarnation == message.incarnation:
            handle(step, storage, message)
        else:
            _stale(step)

    return handler


def _asked(step: Step, request_id: str, gateway_id: str) -> Request | None:
    request = step.state.requests.get(request_id)
    if request is not None and request.submit.gateway_id == gateway_id:
        return request
    _stale(step)
    return None


def _runs_at(step: Step, worker: Worker, request_id: str, attempt: int) -> Request | None:
    """Return the request, if this attempt of it runs at the worker; otherwise count a stale input and return None."""
    request = step.state.requests.get(request_id)
    if (
        request is None
        or request.state not in ADMITTED
        or request.worker_id != worker.worker_id
        or request.attempt != attempt
    ):
        _stale(step)
        return None
    return request


def _cancel(step: Step, message: requests.CancelRequest) -> None:
    request = _asked(step, message.request_id, message.gateway_id)
    if request is not None:
        end_early(step, request, "cancelled")


def _resume(step: Step, message: requests.ResumeRequest) -> None:
    request = _asked(step, message.request_id, message.gateway_id)
    if request is not None:
        resume(step, request, message)


def _worker_gone(step: Step, message: worker_events.WorkerLeft | cell_events.WorkerLost) -> None:
    if arriving_left(step, message.worker_id, message.incarnation):
        return
    worker = _worker(step, message.worker_id, message.incarnation)
    if worker is not None:
        remove_worker(step, worker, has_left=isinstance(message, worker_events.WorkerLeft))


def _worker_draining(step: Step, message: worker_events.WorkerDraining) -> None:
    if arriving_left(step, message.worker_id, message.incarnation):
        step.to_stranger(message.worker_id, message.incarnation, LeaveCell())
        return
    worker = _worker(step, message.worker_id, message.incarnation)
    if worker is not None:
        begin_drain(step, worker, message)


@_of_worker
def _batch_done(step: Step, worker: Worker, message: worker_events.BatchDone) -> None:
    for batch in worker.work.batches:
        if batch.plan == message.plan:
            batch_done(step, worker, batch, message)
            return
    _stale(step)


@_of_worker
def _lease_requested(step: Step, worker: Worker, message: worker_events.LeaseRequested) -> None:
    asked: tuple[worker_events.LeaseRequested | worker_events.LeaseWanted, ...] = (message, *message.others)
    for wanted in asked:
        request = _runs_at(step, worker, wanted.request_id, wanted.attempt)
        if request is not None:
            request_lease(step, worker, request, wanted.generated)


@_of_worker
def _request_finished(step: Step, worker: Worker, message: worker_events.RequestFinished) -> None:
    ended: tuple[worker_events.RequestFinished | worker_events.FinishedToo, ...] = (message, *message.others)
    for each in ended:
        request = _runs_at(step, worker, each.request_id, each.attempt)
        if request is not None:
            request_finished(step, worker, request, each)


@_of_worker
def _request_preempted(step: Step, worker: Worker, message: worker_events.RequestPreempted) -> None:
    request = _runs_at(step, worker, message.request_id, message.attempt)
    if request is not None:
        request_preempted(step, worker, request, message)


@_of_worker
def _text_missing(step: Step, worker: Worker, message: worker_events.TextMissing) -> None:
    text_missing(step, worker, _runs_at(step, worker, message.request_id, message.attempt))


@_of_worker
def _adapter_attached(step: Step, worker: Worker, message: worker_events.AdapterAttached) -> None:
    if adapters.attached(step, worker, message):
        place_unplaced(step, message.digest)


@_of_storage
def _storage_gone(step: Step, storage: Storage, message: storage_events.StorageLeft | cell_events.StorageLost) -> None:
    remove_storage(step, storage, has_left=isinstance(message, storage_events.StorageLeft))


@_of_storage
def _storage_draining(step: Step, storage: Storage, message: storage_events.StorageDraining) -> None:
    grace_ms = min(max(0, message.grace_ms), MOST_GRACE_MS)
    begin_handing_on(step, storage, grace_ms, is_storage_leaving=True)


@_of_storage
def _backup_done(step: Step, storage: Storage, message: storage_events.BackupDone) -> None:
    transfer = step.state.transfers.get(message.transfer_id)
    if transfer is None or transfer.storage_id != storage.storage_id:
        _stale(step)
        return
    step.touch(transfer.worker_id)
    finish_backup(step, transfer, is_ok=message.ok)


@_of_storage
def _chunks_saved(step: Step, storage: Storage, message: storage_events.ChunksSaved) -> None:
    save, hidden_save = step.state.saves.get(message.save_id), step.state.hidden_saves.get(message.save_id)
    if save is not None and save.storage_id == storage.storage_id:
        finish_save(step, storage, save, message)
    elif hidden_save is not None and hidden_save.storage_id == storage.storage_id:
        finish_hidden_save(step, storage, hidden_save, message)
    else:
        _stale(step)
        return
    save_put_off(step, storage)


@_of_storage
def _chunks_listed(step: Step, storage: Storage, message: storage_events.ChunksListed) -> None:
    chunks_added(step.state, storage, message.chunks, message.form)
    save_put_off(step, storage)  # Many chunks that wait to be saved may turn out to be there.


@_of_storage
def _chunks_fetched(step: Step, storage: Storage, message: storage_events.ChunksFetched) -> None:
    chunks_fetched(step, storage, message)
    request_hidden_pool(step, storage)  # Its disk may turn out to be slow.


@_of_storage
def _chunks_dropped(step: Step, storage: Storage, message: storage_events.ChunksDropped) -> None:
    chunks_gone(step.state, storage, message.chunks, message.form)


def _scheduler_started(step: Step, message: cell_events.SchedulerStarted) -> None:
    step.state.epoch = max(step.state.epoch, message.epoch)


def _configured(step: Step, message: cell_events.CellConfigured) -> None:
    configure(step, message.config)
    request_missing_pools(step)
    attach_neighbours(step)


def _input_skipped(step: Step, message: cell_events.InputSkipped) -> None:
    """Note an input that is left out. Its sender begins anew, since no process may wait for its outputs."""
    state = step.state
    if message.seq in state.quarantined:
        _stale(step)
        return
    state.count("inputs_quarantined")
    state.quarantined[message.seq] = Quarantined(
        time_ns=step.time_ns, kind=message.kind, subject=message.subject, reason=message.reason
    )
    if len(state.quarantined) > MOST_QUARANTINED:
        del state.quarantined[next(iter(state.quarantined))]
    step.cancel_timer(message.timer_id)
    arriving_left(step, message.worker_id, message.incarnation)
    worker = state.workers.get(message.worker_id)
    if worker is not None and worker.incarnation == message.incarnation:
        remove_worker(step, worker)
    storage = state.storages.get(message.storage_id)
    if storage is not None and storage.incarnation == message.incarnation:
        remove_storage(step, storage)
    if message.gateway_id and message.request_id and message.request_id not in state.requests:
        text = "the scheduler could not process this request"
        word = RequestFailed(request_id=message.request_id, code=InternalError.code, message=text)
        step.to_gateway(message.gateway_id, word)


LOCAL = (
    requests.SubmitRequest,
    requests.ReclaimRequest,
    requests.CancelRequest,
    requests.ResumeRequest,
    worker_events.BatchDone,
    worker_events.LeaseRequested,
    worker_events.RequestFinished,
    worker_events.RequestPreempted,
    worker_events.PagesPromoted,
    worker_events.HiddenSaved,
    worker_events.TextMissing,
    storage_events.BackupDone,
    storage_events.ChunksSaved,
    storage_events.ChunksListed,
    storage_events.ChunksFetched,
    storage_events.ChunksDropped,
    cell_events.TimerFired,
    cell_events.InputFailed,
    cell_events.SkipInput,
)
"""Inputs after which only touched workers are served; with many workers, serving all takes most of a step's time."""

HANDLERS: dict[type, Callable[[Step, Any], None]] = {
    requests.SubmitRequest: submit,
    requests.ReclaimRequest: reclaim,
    requests.CancelRequest: _cancel,
    requests.ResumeRequest: _resume,
    worker_events.WorkerJoined: worker_joined,
    worker_events.WorkerDraining: _worker_draining,
    worker_events.WorkerLeft: _worker_gone,
    worker_events.BatchDone: _batch_done,
    worker_events.LeaseRequested: _lease_requested,
    worker_events.RequestFinished: _request_finished,
    worker_events.RequestPreempted: _request_preempted,
    worker_events.PagesPromoted: _of_worker(pages_promoted),
    worker_events.HiddenSaved: _of_worker(hidden_saved),
    worker_events.TextMissing: _text_missing,
    worker_events.AdapterAttached: _adapter_attached,
    storage_events.StorageJoined: storage_joined,
    storage_events.StorageLeft: _storage_gone,
    storage_events.HostPoolCreated: _of_storage(host_pool_created),
    storage_events.BackupDone: _backup_done,
    storage_events.ChunksListed: _chunks_listed,
    storage_events.ChunksSaved: _chunks_saved,
    storage_events.ChunksFetched: _chunks_fetched,
    storage_events.ChunksDropped: _chunks_dropped,
    storage_events.StorageDraining: _storage_draining,
    cell_events.CellConfigured: _configured,
    cell_events.SchedulerStarted: _scheduler_started,
    cell_events.WorkerLost: _worker_gone,
    cell_events.StorageLost: _storage_gone,
    cell_events.GatewayLost: lambda step, message: cancel_gateway(step, message.gateway_id),
    cell_events.InputFailed: lambda step, message: step.state.count("inputs_failed"),
    cell_events.SkipInput: lambda step, message: step.state.count("skips_ordered"),
    cell_events.InputSkipped: _input_skipped,
    cell_events.FlushCache: flush,
    cell_events.PinPrefix: pin_prefix,
    cell_events.UnpinPrefix: unpin_prefix,
    cell_events.LoadAdapter: adapters.load,
    cell_events.UnloadAdapter: adapters.unload,
}
