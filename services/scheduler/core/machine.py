"""The fold: one input in, outputs out. This file only finds the handler and turns away what is stale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from services.scheduler.core.backups import finish_backup
from services.scheduler.core.batching import schedule
from services.scheduler.core.cancellation import cancel_gateway, end_early
from services.scheduler.core.catalogue import chunks_added, chunks_gone
from services.scheduler.core.completion import batch_done, request_finished, request_preempted
from services.scheduler.core.configure import configure
from services.scheduler.core.draining import begin_drain
from services.scheduler.core.fetches import cancel_unwanted, chunks_fetched
from services.scheduler.core.flush import flush
from services.scheduler.core.hosts import host_pool_created, remove_storage, storage_joined
from services.scheduler.core.inputs import Stamped
from services.scheduler.core.leases import request_lease
from services.scheduler.core.lifecycle import ADMITTED
from services.scheduler.core.membership import remove_worker, worker_joined
from services.scheduler.core.outputs import Output, SetTimer
from services.scheduler.core.pins import pin_prefix, unpin_prefix
from services.scheduler.core.prefetch import begin_due
from services.scheduler.core.promotion import pages_promoted
from services.scheduler.core.queueing import submit
from services.scheduler.core.resumption import reclaim, resume
from services.scheduler.core.saves import finish_save, save_put_off
from services.scheduler.core.state import CellState, Request, Storage, Worker, count
from services.scheduler.core.state_leases import state_saved
from services.scheduler.core.state_pools import request_state_pool
from services.scheduler.core.state_saves import finish_state_save
from services.scheduler.core.timers import timer_fired
from services.scheduler.core.turn import Turn
from shared.messages import cell_events, requests, storage_events, worker_events


def step(state: CellState, stamped: Stamped) -> list[Output]:
    """Fold one input into ``state`` (in place) and return what follows from it.

    Never raises for a stale, repeated or senseless input: it is counted and ignored. InvariantViolated and
    IllegalTransition mean a fault of the core itself.
    """
    if stamped.seq <= state.last_seq:
        count(state, "stale_inputs")
        return []
    state.last_seq, state.now_ns = stamped.seq, stamped.time_ns
    turn = Turn(state, stamped.seq, stamped.time_ns)
    kind = type(stamped.input)
    _HANDLERS[kind](turn, stamped.input)
    schedule(turn, everywhere=kind not in _LOCAL)
    if state.unwanted:
        cancel_unwanted(turn)
    if state.roomy:
        begin_due(turn)
    return turn.outputs


def pending_timers(state: CellState) -> list[SetTimer]:
    """The timers that a shell must keep after recovery."""
    return [SetTimer(timer_id, timer.at_ns) for timer_id, timer in state.timers.items()]


def _stale(turn: Turn) -> None:
    count(turn.state, "stale_inputs")


def _worker(turn: Turn, worker_id: str, incarnation: str) -> Worker | None:
    worker = turn.state.workers.get(worker_id)
    if worker is not None and worker.incarnation == incarnation:
        turn.touch(worker_id)
        return worker
    _stale(turn)
    return None


def _storage(turn: Turn, storage_id: str, incarnation: str) -> Storage | None:
    storage = turn.state.storages.get(storage_id)
    if storage is not None and storage.incarnation == incarnation:
        return storage
    _stale(turn)
    return None


def _asked(turn: Turn, request_id: str, gateway_id: str) -> Request | None:
    request = turn.state.requests.get(request_id)
    if request is not None and request.submit.gateway_id == gateway_id:
        return request
    _stale(turn)
    return None


def _running(
    turn: Turn,
    message: worker_events.LeaseRequested | worker_events.RequestFinished | worker_events.RequestPreempted,
) -> tuple[Worker, Request] | None:
    """The worker and the request that an event speaks of, if that attempt runs there."""
    worker = _worker(turn, message.worker_id, message.incarnation)
    if worker is None:
        return None
    request = turn.state.requests.get(message.request_id)
    if (
        request is None
        or request.state not in ADMITTED
        or request.worker_id != worker.worker_id
        or request.attempt != message.attempt
    ):
        _stale(turn)
        return None
    return worker, request


def _cancel(turn: Turn, message: requests.CancelRequest) -> None:
    request = _asked(turn, message.request_id, message.gateway_id)
    if request is not None:
        end_early(turn, request, "cancelled")


def _resume(turn: Turn, message: requests.ResumeRequest) -> None:
    request = _asked(turn, message.request_id, message.gateway_id)
    if request is not None:
        resume(turn, request, message)


def _worker_gone(turn: Turn, message: worker_events.WorkerLeft | cell_events.WorkerLost) -> None:
    worker = _worker(turn, message.worker_id, message.incarnation)
    if worker is not None:
        remove_worker(turn, worker)


def _worker_draining(turn: Turn, message: worker_events.WorkerDraining) -> None:
    worker = _worker(turn, message.worker_id, message.incarnation)
    if worker is not None:
        begin_drain(turn, worker, message)


def _batch_done(turn: Turn, message: worker_events.BatchDone) -> None:
    worker = _worker(turn, message.worker_id, message.incarnation)
    if worker is None:
        return
    for batch in worker.batches:
        if batch.plan == message.plan:
            batch_done(turn, worker, batch, message)
            return
    _stale(turn)


def _lease_requested(turn: Turn, message: worker_events.LeaseRequested) -> None:
    found = _running(turn, message)
    if found is not None:
        request_lease(turn, *found, message)


def _request_finished(turn: Turn, message: worker_events.RequestFinished) -> None:
    found = _running(turn, message)
    if found is not None:
        request_finished(turn, *found, message)


def _request_preempted(turn: Turn, message: worker_events.RequestPreempted) -> None:
    found = _running(turn, message)
    if found is not None:
        request_preempted(turn, *found, message)


def _pages_promoted(turn: Turn, message: worker_events.PagesPromoted) -> None:
    worker = _worker(turn, message.worker_id, message.incarnation)
    if worker is not None:
        pages_promoted(turn, worker, message)


def _state_saved(turn: Turn, message: worker_events.StateSaved) -> None:
    worker = _worker(turn, message.worker_id, message.incarnation)
    if worker is not None:
        state_saved(turn, worker, message)


def _storage_gone(turn: Turn, message: storage_events.StorageLeft | cell_events.StorageLost) -> None:
    storage = _storage(turn, message.storage_id, message.incarnation)
    if storage is not None:
        remove_storage(turn, storage)


def _host_pool_created(turn: Turn, message: storage_events.HostPoolCreated) -> None:
    storage = _storage(turn, message.storage_id, message.incarnation)
    if storage is not None:
        host_pool_created(turn, storage, message)


def _backup_done(turn: Turn, message: storage_events.BackupDone) -> None:
    storage = _storage(turn, message.storage_id, message.incarnation)
    if storage is None:
        return
    transfer = turn.state.transfers.get(message.transfer_id)
    if transfer is None or transfer.storage_id != storage.storage_id:
        _stale(turn)
        return
    turn.touch(transfer.worker_id)
    finish_backup(turn, transfer, is_ok=message.ok)


def _chunks_saved(turn: Turn, message: storage_events.ChunksSaved) -> None:
    storage = _storage(turn, message.storage_id, message.incarnation)
    if storage is None:
        return
    save, state_save = turn.state.saves.get(message.save_id), turn.state.state_saves.get(message.save_id)
    if save is not None and save.storage_id == storage.storage_id:
        finish_save(turn, storage, save, message)
    elif state_save is not None and state_save.storage_id == storage.storage_id:
        finish_state_save(turn, storage, state_save, message)
    else:
        _stale(turn)
        return
    save_put_off(turn, storage)


def _chunks_listed(turn: Turn, message: storage_events.ChunksListed) -> None:
    storage = _storage(turn, message.storage_id, message.incarnation)
    if storage is not None:
        chunks_added(turn.state, storage, message.chunks, message.form)
        save_put_off(turn, storage)  # Much of what stands in line may turn out to be there.


def _chunks_fetched(turn: Turn, message: storage_events.ChunksFetched) -> None:
    storage = _storage(turn, message.storage_id, message.incarnation)
    if storage is not None:
        chunks_fetched(turn, storage, message)
        request_state_pool(turn, storage)  # Its disk may turn out to be slow.


def _chunks_dropped(turn: Turn, message: storage_events.ChunksDropped) -> None:
    storage = _storage(turn, message.storage_id, message.incarnation)
    if storage is not None:
        chunks_gone(turn.state, storage, message.chunks, message.form)


def _scheduler_started(turn: Turn, message: cell_events.SchedulerStarted) -> None:
    turn.state.epoch = max(turn.state.epoch, message.epoch)


_LOCAL = (
    requests.SubmitRequest,
    requests.ReclaimRequest,
    requests.CancelRequest,
    requests.ResumeRequest,
    worker_events.BatchDone,
    worker_events.LeaseRequested,
    worker_events.RequestFinished,
    worker_events.RequestPreempted,
    worker_events.PagesPromoted,
    worker_events.StateSaved,
    storage_events.BackupDone,
    storage_events.ChunksSaved,
    storage_events.ChunksListed,
    storage_events.ChunksFetched,
    storage_events.ChunksDropped,
    cell_events.TimerFired,
)
"""Inputs that change nothing for workers that are not touched; in a cell of many, that is most of the time."""

_HANDLERS: dict[type, Callable[[Turn, Any], None]] = {
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
    worker_events.PagesPromoted: _pages_promoted,
    worker_events.StateSaved: _state_saved,
    storage_events.StorageJoined: storage_joined,
    storage_events.StorageLeft: _storage_gone,
    storage_events.HostPoolCreated: _host_pool_created,
    storage_events.BackupDone: _backup_done,
    storage_events.ChunksListed: _chunks_listed,
    storage_events.ChunksSaved: _chunks_saved,
    storage_events.ChunksFetched: _chunks_fetched,
    storage_events.ChunksDropped: _chunks_dropped,
    cell_events.CellConfigured: lambda turn, message: configure(turn, message.config),
    cell_events.SchedulerStarted: _scheduler_started,
    cell_events.TimerFired: lambda turn, message: timer_fired(turn, message.timer_id),
    cell_events.WorkerLost: _worker_gone,
    cell_events.StorageLost: _storage_gone,
    cell_events.GatewayLost: lambda turn, message: cancel_gateway(turn, message.gateway_id),
    cell_events.FlushCache: flush,
    cell_events.PinPrefix: pin_prefix,
    cell_events.UnpinPrefix: unpin_prefix,
}
