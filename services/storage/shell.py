"""The storage's event loop: join, receive plans, move pages and chunks, answer calls, leave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from services.storage import measures
from services.storage.config import StorageConfig
from services.storage.copier import Copier
from services.storage.core.transfer_queue import TransferQueue
from services.storage.media import Media
from services.storage.neighbours import Neighbours
from services.storage.orders import Orders
from services.storage.page_gate import PageGate
from services.storage.pools import Pools
from services.storage.sparse_calls import CALLS_MOST, SparseCalls
from services.storage.standing import StandingCheck
from services.storage.tiers import Tiers
from services.storage.worker_backups import WorkerBackups
from services.storage.worker_stores import WorkerStores
from shared import logs, progress, subjects
from shared.bus.protocol import Bus
from shared.codec import decode, encode
from shared.event_outbox import EventOutbox
from shared.lifecycle import EXIT_FAILED, Lifecycle, beat
from shared.membership import Membership, Readiness, lists_storage
from shared.messages.status import Degradation, GetInventory, Inventory, VerifyChunks
from shared.messages.storage_events import StorageDraining, StorageJoined, StorageLeft
from shared.messages.storage_plans import StoragePlan
from shared.native.build import missing
from shared.plan_receiver import PlanReceiver
from shared.tracing import Tracer

# Longest stop beyond the running copies.
FLUSH_S = 5.0

LEAVE_S = 40.0
"""Longest stop in all. Copies seldom take seconds, but their answers wait for room while the broker is away."""

TOLD_GRACE = 0.9
"""Part of the time for handing on that is announced to the scheduler, whose last word should come before it is over."""

_log = logs.get_logger("storage")


class StorageShell:
    """One incarnation of a storage. ``run`` serves until ``life`` stops, then leaves in order."""

    def __init__(
        self,
        config: StorageConfig,
        bus: Bus,
        pools: Pools,
        media: Media | None = None,
        *,
        incarnation: str,
        tracer: Tracer | None = None,
        readiness: Readiness | None = None,
    ) -> None:
        """Join the parts of one incarnation; nothing runs before :meth:`run`, which closes ``pools`` at its end.

        ``bus`` and ``media`` are closed by the caller. Without ``media`` there are no tiers below host memory; without
        a ``tracer`` no spans are recorded.
        """
        self._config = config
        self._bus = bus
        self._readiness = readiness
        self._pools = pools
        self.incarnation = incarnation
        self._released = asyncio.Event()
        self._queue = TransferQueue(config.max_transfers)
        # Room for the answer of every transfer, and for the few events besides.
        self._outbox = EventOutbox(
            bus,
            subjects.storage_input(config.id),
            incarnation,
            capacity=config.max_transfers + 64,
            waiting=measures.OUTBOX,
        )
        self._neighbours = Neighbours(bus, config.id, config.shm_prefix)
        gate = PageGate()
        standing = StandingCheck(bus, config.id, incarnation)
        self._tiers = Tiers(
            config,
            media or Media(),
            pools,
            gate,
            self._outbox,
            incarnation=incarnation,
            confirm=standing.confirm,
            bus=bus,
            tracer=tracer,
        )
        self._sparse_calls = SparseCalls(lambda: self._tiers.sparse, config.shm_prefix)
        stores = WorkerStores(bus, self._neighbours.is_gone, time.monotonic)
        self._copier = Copier(
            self._queue,
            pools,
            self._outbox,
            gate,
            storage_id=config.id,
            incarnation=incarnation,
            threads=config.threads,
            workers=WorkerBackups(stores, config.id, incarnation, pools.share),
        )
        self._orders = Orders(
            pools,
            self._queue,
            self._copier,
            self._outbox,
            gate,
            self._tiers,
            storage_id=config.id,
            incarnation=incarnation,
            release=self._released.set,
        )
        self._plans = PlanReceiver(
            bus,
            subjects.storage_output(config.id),
            incarnation,
            StoragePlan,
            lambda plan: plan.storage_id == config.id,
            self._orders.execute,
            delays=measures.PLAN_SECONDS,
            fetched=measures.PLANS_FETCHED,
        )

    async def run(self, life: Lifecycle) -> None:
        """Serve until ``life.stopping``. Pools are gone when it returns or raises.

        Raises ConfigError where ``--share`` names a library that is not installed.
        """
        copying = asyncio.create_task(self._copier.run(), name="copier")
        sending = asyncio.create_task(self._outbox.run(), name="outbox")
        moving = asyncio.create_task(self._tiers.run(), name="tiers")
        tasks = [copying, sending, moving]
        try:
            # Listen first: plans for this incarnation may follow the join at once.
            await self._plans.start()
            status = await self._bus.subscribe(subjects.STATUS, self._membership(life).see)
            calls = [
                await self._bus.serve(subjects.rpc("storage", "inventory", self._config.id), self._inventory),
                await self._bus.serve(subjects.rpc("storage", "verify", self._config.id), self._verify),
                await self._bus.serve(
                    subjects.rpc("storage", "sparse", self._config.id), self._sparse_calls.answer, at_once=CALLS_MOST
                ),
            ]
            await self._tiers.sharing.start()
            if self._tiers.sharing.pool is not None:
                subject = subjects.rpc("storage", "pool", self._config.id)
                calls.append(await self._bus.serve(subject, self._tiers.sharing.pool.answer))
            await self._tiers.first_look()
            await self._join()
            progress.ready()
            tasks.append(asyncio.create_task(self._plans.run(), name="plans"))
            tasks.append(asyncio.create_task(self._beat(), name="heartbeat"))
            tasks.append(asyncio.create_task(self._neighbours.run(), name="neighbours"))
            tasks.append(asyncio.create_task(self._orders.run(), name="orders"))
            await life.watch(*tasks)
            ends_s = time.monotonic() + LEAVE_S
            await self._hand_on(life, tasks)
            await self._plans.stop()
            for subscription in (status, *calls):
                await subscription.close()
            try:
                async with asyncio.timeout(ends_s - time.monotonic()):
                    await self._leave(copying, moving)
            except TimeoutError:
                _log.warning("left_unfinished", reason=f"copies and their answers took longer than {LEAVE_S:.0f} s")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            life.has_given_up = life.has_given_up or self._tiers.is_hung
            self._neighbours.close()
            self._sparse_calls.close()
            self._pools.close()

    def _membership(self, life: Lifecycle) -> Membership:
        """Return the membership that ends this process when the cell has given it up: it would get no more orders."""

        def given_up() -> None:
            if not life.stopping.is_set():
                _log.error("given_up", reason="the cell has given this incarnation up; another must be started")
                life.stop(EXIT_FAILED)

        return Membership(
            lambda status: lists_storage(status, self._config.id, self.incarnation),
            given_up,
            lambda: self._outbox.stored_seq,
            self._readiness,
        )

    async def _join(self) -> None:
        config = self._config
        await self._outbox.put_when_room(
            StorageJoined(
                storage_id=config.id,
                incarnation=self.incarnation,
                node=config.node_name,
                host_bytes=config.host_kv_bytes,
                disk_bytes=self._tiers.disk_bytes,
                has_remote=self._tiers.has_remote,
                hidden_bytes=self._tiers.hidden_bytes,
                disk_bytes_per_s=float(config.disk_read_bytes_per_s),
                keeps_sparse=self._tiers.keeps_sparse,
                shares=self._tiers.sharing.engine_name,
                disk_measured_bytes_per_s=self._tiers.measured_bytes_per_s,
                shapes=self._tiers.shapes,
                handover_bytes=self._handover_bytes,
                takes_compact=True,
            )
        )
        _log.info("storage_joined", incarnation=self.incarnation, node=config.node_name)

    @property
    def _handover_bytes(self) -> int:
        """Host memory that other nodes may copy at the end, in bytes."""
        is_shared = self._tiers.sharing.pool is not None and self._config.handover_ms > 0
        return self._config.handover_bytes if is_shared else 0

    async def _hand_on(self, life: Lifecycle, tasks: list[asyncio.Task[None]]) -> None:
        """Let other nodes copy hot pages, until the scheduler releases this storage or the time is over.

        A second signal ends it, too. An error that ends a task is raised here as it is by ``Lifecycle.watch``.
        """
        config = self._config
        if not self._handover_bytes or life.exit_code or life.hurrying.is_set():
            return
        grace_ms = int(config.handover_ms * TOLD_GRACE)
        ends = [asyncio.create_task(_until(end)) for end in (self._released, life.hurrying)]
        try:
            async with asyncio.timeout(config.handover_ms / 1e3):
                await self._outbox.put_when_room(
                    StorageDraining(storage_id=config.id, incarnation=self.incarnation, grace_ms=grace_ms)
                )
                done, _ = await asyncio.wait({*ends, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except TimeoutError:
            pass  # Pages that were not copied are computed again at their next use.
        finally:
            for end in ends:
                end.cancel()
        _log.info("handed_on", released=self._released.is_set())

    async def _leave(self, copying: asyncio.Task[None], moving: asyncio.Task[None]) -> None:
        await self._copier.stop()
        self._tiers.stop()
        for ended in self._queue.revoke_waiting("the storage is stopping"):
            await self._copier.answer(ended)
        await copying
        await moving
        await self._outbox.put_when_room(StorageLeft(storage_id=self._config.id, incarnation=self.incarnation))
        if not await self._outbox.drained(FLUSH_S):
            _log.warning("left_unannounced", reason="the broker did not answer in time")

    async def _beat(self) -> None:
        await beat(
            self._bus,
            "storage",
            self._config.id,
            self.incarnation,
            lambda: self._plans.last,
            self._tiers.owned_bytes,
            self._degraded,
        )

    def _degraded(self) -> Iterator[Degradation]:
        """Yield features that this storage was asked for and lacks now."""
        for what, reason, setting in (*self._pools.faults(), *self._tiers.faults()):
            yield Degradation(component=self._config.id, what=what, reason=reason, setting=setting)
        for name, reason in dict(missing).items():
            slower = f"a portable path replaces {name}: {reason}"
            yield Degradation(component=self._config.id, what="native code", reason=slower)

    async def _inventory(self, data: bytes) -> bytes:
        decode(data, GetInventory)
        totals = self._copier.totals
        return encode(
            Inventory(
                id=self._config.id,
                incarnation=self.incarnation,
                last_plan=self._plans.last,
                pages_total=self._pools.host_pages,
                counters={
                    "backups_done": totals.transfers,
                    "backups_failed": totals.failed,
                    "pages_backed_up": totals.pages,
                    "bytes_backed_up": totals.nbytes,
                    "transfers_outstanding": len(self._queue),
                    "hidden_pages_total": self._pools.hidden_pages,
                    **self._tiers.counters(),
                },
            )
        )

    async def _verify(self, data: bytes) -> bytes:
        return encode(await self._tiers.verify(decode(data, VerifyChunks)))


async def _until(event: asyncio.Event) -> None:
    await event.wait()
