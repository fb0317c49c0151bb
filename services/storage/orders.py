"""Execution of each kind of order. An order that cannot be carried out is answered (or logged), never raised."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from services.storage import measures
from services.storage.copier import MAX_ERROR_LENGTH, Copier
from services.storage.core.transfer_queue import TransferQueue
from services.storage.page_gate import PageGate
from services.storage.pipelines import form_of
from services.storage.pools import Pools
from services.storage.tiers import Tiers
from shared import logs
from shared.backoff import Backoff
from shared.errors import ThermoclineError
from shared.event_outbox import EventOutbox
from shared.messages.pools import ChunkForm, PoolHandle, form_name
from shared.messages.storage_events import HostPoolCreated
from shared.messages.storage_plans import (
    AttachDevicePool,
    BackupPages,
    CancelFetch,
    CreateHostPool,
    DetachDevicePool,
    DropChunks,
    FetchChunks,
    PinChunks,
    ReleaseStorage,
    SaveChunks,
    SaveTokens,
    StoragePlan,
)

RETRY_FIRST_S, RETRY_MOST_S = 1.0, 30.0
"""Waits before a pool for which there was no room is tried again. Where a storage was killed, its workers map its pool
for a moment longer.
"""

_log = logs.get_logger("storage")


class Orders:
    """Executes plans in the order in which they are given."""

    def __init__(
        self,
        pools: Pools,
        queue: TransferQueue,
        copier: Copier,
        outbox: EventOutbox,
        gate: PageGate,
        tiers: Tiers,
        *,
        storage_id: str,
        incarnation: str,
        release: Callable[[], None],
    ) -> None:
        """Prepare; ``release`` is called when the scheduler lets this storage go."""
        self._pools = pools
        self._release = release
        self._queue = queue
        self._copier = copier
        self._outbox = outbox
        self._gate = gate
        self._tiers = tiers
        self._storage_id = storage_id
        self._incarnation = incarnation
        self._refused: dict[ChunkForm, CreateHostPool] = {}
        self._creating = asyncio.Lock()

    async def run(self) -> None:
        """Try again to make pools for which there was no room, until cancelled: another process may have taken it."""
        backoff = Backoff(RETRY_FIRST_S, RETRY_MOST_S)
        while True:
            await asyncio.sleep(backoff.next_s())
            if not self._refused:
                backoff.reset()
            for order in list(self._refused.values()):
                await self._create_pool(order)

    async def execute(self, plan: StoragePlan) -> None:
        """Carry out one plan. Backups, saves, fetches and drops are only queued here; each is answered at its end."""
        order = plan.order
        try:
            match order:
                case CreateHostPool():
                    await self._create_pool(order)
                case AttachDevicePool():
                    await self._revoke(order.worker_id, "its device pool was replaced")
                    await asyncio.to_thread(self._pools.attach, order)
                    _log.info("device_pool_attached", worker=order.worker_id, pages=order.handle.pages)
                case DetachDevicePool():
                    if self._pools.detach(order.worker_id, order.worker_incarnation):
                        await self._revoke(order.worker_id, "its device pool was detached")
                        _log.info("device_pool_detached", worker=order.worker_id)
                case BackupPages():
                    await self._queue_backup(order)
                case SaveChunks() | SaveTokens():
                    await self._tiers.save(order)
                case FetchChunks():
                    await self._tiers.fetch(order)
                case CancelFetch():
                    self._tiers.cancel(order.fetch_id)
                case PinChunks():
                    self._tiers.pin(order)
                case DropChunks():
                    self._tiers.drop(order)
                case ReleaseStorage():
                    self._release()
        except Exception as error:
            # One bad order must not end the storage, which holds the host pages of all requests.
            name = type(order).__name__
            measures.FAILURES.labels(name).inc()
            known = isinstance(error, ThermoclineError)
            _log.warning("order_failed", order=name, number=plan.number, reason=str(error), exc_info=not known)

    async def _create_pool(self, order: CreateHostPool) -> None:
        geometry = order.geometry
        form = form_of(geometry)
        create = self._pools.create_hidden if geometry.is_hidden else self._pools.create_host
        handle: PoolHandle | None = None
        reason = ""
        async with self._creating:
            was_refused = self._refused.pop(form, None) == order
            try:
                handle = await asyncio.to_thread(create, geometry)
                _log.info("host_pool_created", form=form_name(form), pages=handle.pages, nbytes=handle.nbytes)
            except Exception as error:
                self._refused[form] = order
                if was_refused:
                    return  # That was told already.
                measures.FAILURES.labels("CreateHostPool").inc()
                reason, known = str(error) or type(error).__name__, isinstance(error, ThermoclineError)
                _log.warning("host_pool_not_created", form=form_name(form), reason=reason, exc_info=not known)
        await self._outbox.put_when_room(
            HostPoolCreated(
                storage_id=self._storage_id,
                incarnation=self._incarnation,
                handle=handle,
                error=reason[:MAX_ERROR_LENGTH],
                form=form,
            )
        )
        if handle is not None:
            # The disk's chunks are announced after the pool, because they cannot be loaded before.
            self._tiers.open(geometry, is_read_in_part=order.is_read_in_part)

    async def _queue_backup(self, order: BackupPages) -> None:
        try:
            transfer = self._pools.check(order)
            reads = self._gate.write_ordered(transfer.host_pages.tolist())
            added = self._queue.add(replace(transfer, after=reads))
        except Exception as error:
            await self._copier.answer_error(order.transfer_id, str(error) or type(error).__name__)
            return
        if added:
            measures.TRANSFERS.set(len(self._queue))
            await self._copier.wake()

    async def _revoke(self, worker_id: str, reason: str) -> None:
        for ended in self._queue.revoke(worker_id, reason):
            await self._copier.answer(ended)
