"""The worker's event loop: plans in, events and tokens out. It decides nothing.

The compute thread runs the executor. Its reports come back through a channel; everything here only moves them
on: events to the inputs stream through the outbox, items to gateways, and a copy to the retained outputs.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from services.worker import metrics
from services.worker.compute import Runner
from services.worker.config import WorkerConfig
from services.worker.detokenizer import Vocabulary
from services.worker.executor import Executor
from services.worker.importance.disk_prefix import DiskPrefix
from services.worker.importance.disk_reads import DiskReads
from services.worker.inbox import Arrival
from services.worker.kv.loads import Loads
from services.worker.report_channel import ReportChannel
from services.worker.reports import Report
from services.worker.request_spans import RequestSpans
from services.worker.restore.projection import KvProjection
from services.worker.retained import RetainedOutputs
from services.worker.sparse_prefixes import ImportanceSettings, SparsePrefixes
from services.worker.state_saving import StateSaving
from services.worker.streams import wait_for_streams
from services.worker.thread_device import use_device
from services.worker.token_sender import TokenSender
from shared import logs, progress, subjects
from shared.bus.protocol import Bus, Subscription
from shared.codec import decode, encode
from shared.errors import InternalError, OperatorError, TransportError
from shared.event_outbox import EventOutbox
from shared.lifecycle import Lifecycle, beat
from shared.membership import Membership, lists_worker
from shared.messages.status import Degradation, GetInventory, GetOutputs, Inventory, Outputs
from shared.messages.tokens import TokenBatch, TokenItem
from shared.messages.worker_events import DeviceFacts, RestorationCosts, WorkerDraining, WorkerJoined, WorkerLeft
from shared.messages.worker_plans import AbortRequest, AdmitRequest, Dismiss, LeaveCell, WorkerPlan
from shared.plan_receiver import PlanReceiver

_log = logs.get_logger("worker")

TOKEN_MESSAGES_QUEUED = 4096
LEAVE_TIMEOUT_S = 5.0

TOLD_GRACE = 0.9
"""Of the time for draining, what the scheduler is told: its last word should come before we stop waiting for it."""


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Who this process is to the cell. ``model`` is the fingerprint."""

    worker_id: str
    incarnation: str
    node: str
    model: str
    device: DeviceFacts | None = None


class WorkerShell:
    """One incarnation of one worker."""

    def __init__(
        self,
        config: WorkerConfig,
        identity: WorkerIdentity,
        bus: Bus,
        runner: Runner,
        vocabulary: Vocabulary,
        loads: Loads,
        *,
        projection: KvProjection | None = None,
        restoration: RestorationCosts | None = None,
        saving: StateSaving | None = None,
        disk_reads: DiskReads | None = None,
        spans: RequestSpans | None = None,
        degraded: Callable[[], Iterable[Degradation]] = tuple,
    ) -> None:
        """Without ``projection`` nothing is restored from hidden states, without ``disk_reads`` no part of a prefix is
        read from the disk. ``restoration`` is what the cell is told that restoring costs here. ``saving`` is by default
        one that has ``projection``. ``spans`` traces requests. ``degraded`` is what this worker was asked for and
        lacks.
        """
        loop = asyncio.get_running_loop()
        self._config = config
        self._who = identity
        self._restoration = restoration
        self._bus = bus
        self._disk_reads = disk_reads
        self._spans = spans
        self._degraded = degraded
        self._runner = runner
        self._channel = ReportChannel(loop, self._take_report)
        self.executor = Executor(
            identity.worker_id,
            identity.incarnation,
            runner,
            vocabulary,
            loads,
            self._channel.post,
            lease_low_tokens=config.lease_low_tokens,
            clock_ns=time.time_ns,
            projection=projection,
            saving=saving,
            sparse=SparsePrefixes(
                runner.pool,
                None if disk_reads is None else partial(DiskPrefix, reads=disk_reads),
                time.time_ns,
                ImportanceSettings(config.importance_probe_heads, config.importance_alpha, config.speculation),
            ),
            restore_staging_bytes=config.restore_staging_bytes,
            restore_timeout_s=config.load_timeout_ms / 1e3,
        )
        self._outbox = EventOutbox(
            bus, subjects.worker_input(identity.worker_id), identity.incarnation,
            capacity=config.pending_events, waiting=metrics.PENDING_EVENTS,
        )  # fmt: skip
        self._tokens = TokenSender(bus, capacity=TOKEN_MESSAGES_QUEUED, on_too_large=self._abort_too_large)
        self._retained = RetainedOutputs(config.retained_outputs)
        self._plans = PlanReceiver(
            bus, subjects.worker_output(identity.worker_id), identity.incarnation,
            WorkerPlan, lambda plan: plan.worker_id == identity.worker_id, self._deliver,
            delays=metrics.PLAN_SECONDS, fetched=metrics.PLANS_FETCHED,
        )  # fmt: skip
        self._membership = Membership(
            lambda status: lists_worker(status, identity.worker_id, identity.incarnation),
            lambda: self._end(TransportError("the cell has given this incarnation up")),
            lambda: self._outbox.stored_seq,
        )
        self._stopping = False
        self._let_go = asyncio.Event()  # The scheduler has nothing left for this worker to do.
        self._ended = asyncio.Event()
        self._reason: Exception | None = None

    async def run(self, life: Lifecycle) -> None:
        """Join, work until stopping, drain, leave. Raises OperatorError when the cell dismisses this worker."""
        if not await wait_for_streams(self._bus, life):
            return
        subscriptions = [
            await self._bus.serve(subjects.rpc("worker", "inventory", self._who.worker_id), self._inventory),
            await self._bus.serve(subjects.rpc("worker", "outputs", self._who.worker_id), self._outputs),
            await self._bus.subscribe(subjects.STATUS, self._membership.see),
        ]
        if self._disk_reads is not None:
            subscriptions.append(await self._bus.subscribe(subjects.STATUS, self._disk_reads.see))
        await self._plans.start()
        self._join()
        progress.ready()
        computing: Future[None] = Future()
        threading.Thread(target=self._compute, args=(computing,), name="compute", daemon=True).start()
        outbox = asyncio.create_task(self._outbox.run(), name="outbox")
        tasks = [
            outbox,
            *self._spawn(
                _finished(computing),
                self._plans.run(),
                self._tokens.run(),
                self._wait_for_end(),
                beat(
                    self._bus,
                    "worker",
                    self._who.worker_id,
                    self._who.incarnation,
                    lambda: self.executor.last_executed,
                    degraded=self._degraded,
                ),
            ),
        ]
        dismissed = False
        try:
            await life.watch(*tasks)
            await self._drain(life, tasks)
        except OperatorError:
            dismissed = True
            raise
        finally:
            await self._leave(subscriptions, tasks, outbox, computing, says_so=not dismissed)

    # -- joining and leaving ----------------------------------------------------------------------------------

    def _join(self) -> None:
        self._outbox.put(
            WorkerJoined(
                worker_id=self._who.worker_id,
                incarnation=self._who.incarnation,
                node=self._who.node,
                model=self._who.model,
                pool=self._runner.pool.handle(),
                max_context=self._runner.max_context,
                restoration=self._restoration,
                device=self._who.device,
            )
        )
        _log.info("joining", incarnation=self._who.incarnation, pages=self._runner.pool.pages)

    async def _drain(self, life: Lifecycle, tasks: list[asyncio.Task[None]]) -> None:
        """Go on until the scheduler lets this worker go, its time is over, or a second signal comes.

        What ends a task is raised here as it is by ``Lifecycle.watch``.
        """
        grace_ms = self._config.drain_timeout_ms
        if not grace_ms or life.hurrying.is_set():
            return
        self._outbox.put(
            WorkerDraining(
                worker_id=self._who.worker_id,
                incarnation=self._who.incarnation,
                grace_ms=int(grace_ms * TOLD_GRACE),
            )
        )
        _log.info("draining", running=len(self.executor.request_ids), grace_ms=grace_ms)
        metrics.DRAINING.set(1)
        ends = self._spawn(_until(self._let_go), _until(life.hurrying))
        try:
            done, _ = await asyncio.wait({*ends, *tasks}, timeout=grace_ms / 1e3, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await _cancel(ends)
        _log.info("drained", let_go=self._let_go.is_set(), running=len(self.executor.request_ids))

    async def _leave(
        self,
        subscriptions: list[Subscription],
        tasks: list[asyncio.Task[None]],
        outbox: asyncio.Task[None],
        computing: Future[None],
        *,
        says_so: bool,
    ) -> None:
        """Take no more plans, finish the step, tell everything that there is to tell."""
        self._stopping = True
        self.executor.inbox.close()
        await self._plans.stop()
        done, _ = await asyncio.wait(
            {asyncio.ensure_future(_finished(computing))}, timeout=self._config.stop_timeout_ms / 1e3
        )
        for task in done:
            task.exception()  # Raised by ``watch`` already, or of no interest any more.
        self._channel.drain()
        await _cancel([task for task in tasks if task is not outbox])
        await self._tokens.flush()
        if says_so and not outbox.done():
            self._outbox.put(WorkerLeft(worker_id=self._who.worker_id, incarnation=self._who.incarnation))
            if not await self._outbox.drained(LEAVE_TIMEOUT_S):
                _log.warning("left_unsaid", events=len(self._outbox))
        await _cancel([outbox])
        for subscription in subscriptions:
            await subscription.close()
        _log.info("left", last_plan=self.executor.last_executed, **self.executor.counters.as_dict())

    def _compute(self, result: Future[None]) -> None:
        """The compute thread."""
        result.set_running_or_notify_cancel()  # From now on nobody can cancel it.
        try:
            use_device(self._runner.pool.device)
            if self._config.threads:
                torch.set_num_threads(self._config.threads)
            self.executor.run()
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(None)

    def _spawn(self, *bodies: Coroutine[Any, Any, None]) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(body) for body in bodies]

    # -- plans in ---------------------------------------------------------------------------------------------

    async def _deliver(self, plan: WorkerPlan) -> None:
        """Hand a plan to the compute thread."""
        if isinstance(plan.order, Dismiss):
            self._end(OperatorError(f"dismissed: {plan.order.reason}"))
            return
        if isinstance(plan.order, LeaveCell):
            self._let_go.set()
            return
        if self._spans is not None and isinstance(plan.order, AdmitRequest):
            self._spans.admitted(plan.order)
        if not self._stopping:
            self._hand_over(Arrival(plan.number, plan.order, time.time_ns()))

    def _hand_over(self, arrival: Arrival) -> None:
        try:
            self.executor.inbox.put(arrival)
        except InternalError as error:
            self._end(error)

    def _abort_too_large(self, item: TokenItem) -> None:
        order = AbortRequest(request_id=item.request_id, attempt=item.attempt, reason="error")
        self._hand_over(Arrival(0, order, time.time_ns()))

    # -- reports out ------------------------------------------------------------------------------------------

    def _take_report(self, report: Report) -> None:
        try:
            for event in report.events:
                self._outbox.put(event)
        except InternalError as error:
            self._end(error)
            return
        for item in report.recalled:
            self._retained.recall(item)
        for gateway_id, items in report.items.items():
            for item in items:
                self._retained.add(item)
            batch = TokenBatch(
                worker_id=self._who.worker_id,
                incarnation=self._who.incarnation,
                step=report.step,
                items=tuple(items),
            )
            self._tokens.put(gateway_id, batch)
        if self._spans is not None:
            self._spans.reported(report)
        for request_id in report.preempted:
            self._retained.retire(request_id)

    # -- calls and the end --------------------------------------------------------------------------------------

    async def _inventory(self, data: bytes) -> bytes:
        decode(data, GetInventory)
        return encode(
            Inventory(
                id=self._who.worker_id,
                incarnation=self._who.incarnation,
                last_plan=self.executor.last_executed,
                requests=self.executor.request_ids,
                pages_total=self._runner.pool.pages,
                counters=self.executor.counters.as_dict(),
            )
        )

    async def _outputs(self, data: bytes) -> bytes:
        asked = decode(data, GetOutputs)
        # Some room is left for what surrounds the item on the wire.
        limit = self._bus.max_payload * 3 // 4
        item = self._retained.find(asked.request_id, asked.index, max_bytes=limit)
        return encode(Outputs(item=item))

    def _end(self, reason: Exception) -> None:
        """End this incarnation; the first reason counts."""
        self._reason = self._reason or reason
        self._ended.set()

    async def _wait_for_end(self) -> None:
        await self._ended.wait()
        assert self._reason is not None
        raise self._reason


async def _finished(result: Future[None]) -> None:
    await asyncio.wrap_future(result)


async def _until(event: asyncio.Event) -> None:
    await event.wait()


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
