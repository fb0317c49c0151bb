"""The worker's event loop: join, send heartbeats, drain and leave around the parts of the composition root.

It decides nothing. Plans come in through :class:`PlanReceiver` and go to the compute thread, which runs the executor;
its reports come back through a channel.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from services.worker import metrics
from services.worker.compute import Runner
from services.worker.config import WorkerConfig
from services.worker.ending import Ending
from services.worker.executor import Executor
from services.worker.identity import WorkerIdentity
from services.worker.report_channel import ReportChannel
from services.worker.retained import RetainedOutputs
from services.worker.store_calls import CALLS_MOST, StoreCalls
from services.worker.streams import wait_for_streams
from services.worker.thread_device import use_device
from services.worker.token_sender import TokenSender
from shared import logs, progress, subjects
from shared.bus.protocol import Bus, Delivery, Subscription
from shared.codec import decode, encode
from shared.errors import OperatorError
from shared.event_outbox import EventOutbox
from shared.kept_texts import MOST_KEPT_TOKENS
from shared.lifecycle import Lifecycle, beat
from shared.messages.status import Degradation, GetInventory, GetOutputs, Inventory, Outputs
from shared.messages.worker_events import RestorationCosts, WorkerDraining, WorkerJoined, WorkerLeft
from shared.messages.worker_plans import WorkerPlan
from shared.plan_receiver import PlanReceiver

_log = logs.get_logger("worker")

LEAVE_TIMEOUT_S = 5.0

TOLD_GRACE = 0.9
"""Part of the time for draining that is announced to the scheduler, whose last word should come before it is over."""


class WorkerShell:
    """One incarnation of one worker."""

    def __init__(
        self,
        config: WorkerConfig,
        identity: WorkerIdentity,
        bus: Bus,
        runner: Runner,
        executor: Executor,
        *,
        plans: PlanReceiver[WorkerPlan],
        let_go: asyncio.Event,
        channel: ReportChannel,
        outbox: EventOutbox,
        tokens: TokenSender,
        retained: RetainedOutputs,
        ending: Ending,
        status_readers: Sequence[Callable[[Delivery], Awaitable[None]]],
        stores: StoreCalls | None,
        restoration: RestorationCosts | None,
        degraded: Callable[[], Iterable[Degradation]],
    ) -> None:
        """Prepare; ``let_go`` is set when the scheduler has nothing left for this worker to do.

        ``stores`` copies pages for the storage, where this worker does that. ``restoration`` is the cost of restoring
        here, as announced to the cell, ``degraded`` lists features that were asked for and are missing here.
        """
        self.executor = executor
        self._config, self._who, self._bus, self._runner = config, identity, bus, runner
        self._plans, self._let_go = plans, let_go
        self._channel, self._outbox, self._tokens, self._retained = channel, outbox, tokens, retained
        self._ending = ending
        self._status_readers, self._stores = status_readers, stores
        self._restoration, self._degraded = restoration, degraded

    async def run(self, life: Lifecycle) -> None:
        """Join, work until stopping, drain, leave. Raises OperatorError when the cell dismisses this worker."""
        if not await wait_for_streams(self._bus, life):
            return
        subscriptions = [
            await self._bus.serve(subjects.rpc("worker", "inventory", self._who.worker_id), self._inventory),
            await self._bus.serve(subjects.rpc("worker", "outputs", self._who.worker_id), self._outputs),
            *[await self._bus.subscribe(subjects.STATUS, reader) for reader in self._status_readers],
        ]
        if self._stores is not None:
            store = subjects.rpc("worker", "store", self._who.worker_id)
            subscriptions.append(await self._bus.serve(store, self._stores.answer, at_once=CALLS_MOST))
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
                self._ending.wait(),
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
                kept_tokens=MOST_KEPT_TOKENS,
                takes_compact=True,
                kernels=self._who.kernels,
                reads_no_parts=self._who.reads_no_parts,
            )
        )
        _log.info("joining", incarnation=self._who.incarnation, pages=self._runner.pool.pages)

    async def _drain(self, life: Lifecycle, tasks: list[asyncio.Task[None]]) -> None:
        """Serve until the scheduler releases this worker, its time is over, or a second signal comes.

        An error that ends a task is raised here as it is by ``Lifecycle.watch``.
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
        """Take no more plans, finish the step, and send all events and items that are queued."""
        self.executor.inbox.close()
        await self._plans.stop()
        done, _ = await asyncio.wait(
            {asyncio.ensure_future(_finished(computing))}, timeout=self._config.stop_timeout_ms / 1e3
        )
        for task in done:
            task.exception()  # Raised by ``watch`` already, or irrelevant by now.
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
        """Run the compute thread."""
        result.set_running_or_notify_cancel()  # From now on it cannot be cancelled.
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

    # -- calls -------------------------------------------------------------------------------------------------

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
        # Some room is left for the message around the item.
        limit = self._bus.max_payload * 3 // 4
        item = self._retained.find(asked.request_id, asked.index, max_bytes=limit)
        return encode(Outputs(item=item))


async def _finished(result: Future[None]) -> None:
    await asyncio.wrap_future(result)


async def _until(event: asyncio.Event) -> None:
    await event.wait()


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
