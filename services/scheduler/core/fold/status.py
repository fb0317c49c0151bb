"""The cell's status as published."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.scheduler.core.fold.usage import owner_bytes, tenant_loads
from services.scheduler.core.waiting.waits import transient_nodes
from shared.messages.status import CellStatus, PoolStatus, RestorationStatus, StorageBudget, WorkerStatus

if TYPE_CHECKING:
    from services.scheduler.core.cache.page_pool import PagePool
    from services.scheduler.core.prediction_error import MethodError
    from services.scheduler.core.state import CellState, Storage, Worker


def status(state: CellState, scheduler_id: str) -> CellStatus:
    """What the cell looks like now. Does not mutate."""
    pools = [_device(worker.worker_id, worker.pool) for worker in state.workers.values()]
    pools += [
        _host(storage.storage_id, storage.pool) for storage in state.storages.values() if storage.pool is not None
    ]
    pools += [
        _state(storage, storage.hidden_pool) for storage in state.storages.values() if storage.hidden_pool is not None
    ]
    page_size = state.tree.page_size
    in_queue, in_flight = transient_nodes(state)
    return CellStatus(
        scheduler_id=scheduler_id,
        epoch=state.epoch,
        seq=state.last_seq,
        model=state.model,
        page_size=page_size,
        queued=state.queued,
        running=sum(len(worker.running) for worker in state.workers.values()),
        max_queued=state.config.max_queued,
        max_context=max(
            (min(worker.max_context, worker.pool.total * page_size) for worker in _serving(state)), default=0
        ),
        workers=tuple(
            WorkerStatus(
                worker_id=worker.worker_id,
                incarnation=worker.incarnation,
                running=len(worker.running),
                waiting=worker.queue.size + len(worker.deferred),
                draining=worker.drain is not None,
                device=worker.device,
            )
            for worker in state.workers.values()
        ),
        storages=tuple(state.storages),
        storage_incarnations={storage.storage_id: storage.incarnation for storage in state.storages.values()},
        pools=tuple(pools),
        counters=dict(state.counters),
        nodes=len(state.tree.nodes) - len(state.tree.roots),
        saves=len(state.saves) + len(state.hidden_saves),
        pins=sum(not pin.refusal for pin in state.pins.values()),
        pinned_pages=sum(pin.pages for pin in state.pins.values()),
        chunks=sum(len(storage.chunks) for storage in state.storages.values()),
        state_chunks=sum(len(storage.hidden_chunks) for storage in state.storages.values()),
        sparse_chunks=sum(len(storage.sparse_chunks) for storage in state.storages.values()),
        fetches=len(state.fetches) + len(state.hidden_fetches),
        deferred=sum(len(worker.deferred) for worker in state.workers.values()),
        in_queue_nodes=in_queue,
        in_flight_nodes=in_flight,
        restorations=tuple(_restoration(kind, found) for kind, found in state.predictions.by_kind.items()),
        deferred_for_fetch=sum(
            state.requests[request_id].waits_fetch > 0
            for worker in state.workers.values()
            for request_id in worker.deferred
        ),
        unplaced=len(state.unplaced),
        tenant_loads=tenant_loads(state),
        owner_bytes=owner_bytes(state),
        dtype=state.geometry.dtype if state.geometry is not None else "",
        page_bytes=state.geometry.page_bytes if state.geometry is not None else 0,
        budgets=tuple(
            StorageBudget(
                storage_id=storage.storage_id,
                host=storage.host_bytes,
                awaits_pool=storage.is_pool_requested and storage.pool is None,
                disk=storage.disk_bytes,
                has_remote=storage.has_remote,
            )
            for storage in state.storages.values()
        ),
    )


def _serving(state: CellState) -> list[Worker]:
    """The workers that new requests go to, or all where none takes any."""
    return [worker for worker in state.workers.values() if worker.drain is None] or list(state.workers.values())


def _restoration(kind: str, found: MethodError) -> RestorationStatus:
    return RestorationStatus(
        kind=kind,
        count=found.observations,
        predicted_seconds=found.predicted_us / 1e6,
        observed_seconds=found.observed_us / 1e6,
        bias=found.bias,
        error=found.magnitude,
    )


def _device(owner: str, pool: PagePool) -> PoolStatus:
    return PoolStatus(
        owner=owner, tier="device", total=pool.total, free=pool.free, cached=pool.cached, leased=pool.leased
    )


def _host(owner: str, pool: PagePool) -> PoolStatus:
    return PoolStatus(
        owner=owner, tier="host", total=pool.total, free=pool.free, cached=pool.cached, leased=pool.leased
    )


def _state(storage: Storage, pool: PagePool) -> PoolStatus:
    return PoolStatus(
        owner=storage.storage_id,
        tier="state",
        total=pool.total,
        free=pool.free,
        cached=pool.cached,
        leased=pool.leased,
        form=storage.hidden_handle.geometry.form if storage.hidden_handle is not None else "",
    )
