"""Numbered plans as they come in: heard over core NATS, and read from ``TC_OUTPUTS`` where one was missed.

A gap shows by a number that is too high. The last plan of all leaves no gap when it is lost, so the stream is
also read after each reconnection and, at long intervals, for no reason.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from services.worker import metrics
from shared import logs, subjects
from shared.bus.protocol import Bus, Delivery, Subscription
from shared.codec import decode_published
from shared.errors import CodecError, TransportError, Unavailable
from shared.messages.worker_plans import WorkerPlan
from shared.plan_order import PlanOrder

_log = logs.get_logger("worker")

RESYNC_S = 5.0
RETRY_FIRST_S = 0.02
RETRY_MOST_S = 1.0
GAP_TIMEOUT_S = 30.0
"""A missing plan that the stream does not have by then is gone; only a new incarnation helps."""

Deliver = Callable[[WorkerPlan], Awaitable[None]]


class PlanReceiver:
    """Hands each plan of this incarnation to ``deliver`` once, in order."""

    def __init__(
        self, bus: Bus, worker_id: str, incarnation: str, deliver: Deliver, *, clock_s: Callable[[], float]
    ) -> None:
        self._bus = bus
        self._subject = subjects.worker_output(worker_id)
        self._deliver = deliver
        self._clock_s = clock_s
        self._order: PlanOrder[WorkerPlan] = PlanOrder(incarnation)
        self._next_seq = 1
        self._wanted = asyncio.Event()
        self._turn = asyncio.Lock()  # Plans heard and plans read must not overtake one another.
        self._subscription: Subscription | None = None

    @property
    def last(self) -> int:
        """Number of the last plan handed on."""
        return self._order.last

    async def start(self) -> None:
        """Listen from now on; call before the join is announced, so that no plan can be earlier."""
        self._next_seq = (await self._bus.stream_info(subjects.OUTPUTS_STREAM)).last_seq + 1
        self._subscription = await self._bus.subscribe(self._subject, self._heard)
        self._bus.on_reconnect(self._wanted.set)

    async def stop(self) -> None:
        """Listen no more."""
        if self._subscription is not None:
            await self._subscription.close()
            self._subscription = None

    async def run(self) -> None:
        """Read from the stream what was missed, for ever. Raises TransportError when a gap cannot be closed."""
        while True:
            try:
                # Not wait_for: in Python 3.11 that swallows a cancellation which comes together with the event.
                async with asyncio.timeout(RESYNC_S):
                    await self._wanted.wait()
            except TimeoutError:
                pass  # Nothing is known to be missing; look all the same.
            self._wanted.clear()
            await self._catch_up()

    async def _catch_up(self) -> None:
        started, delay = self._clock_s(), RETRY_FIRST_S
        while True:
            try:
                await self._read_stream()
            except Unavailable:
                # Without the broker nothing can be missed; the reconnection wakes us.
                return
            missing = self._order.missing
            if missing is None:
                return
            if self._clock_s() - started > GAP_TIMEOUT_S:
                raise TransportError(f"plans {missing.start} to {missing.stop - 1} are nowhere to be found")
            await asyncio.sleep(delay)
            delay = min(RETRY_MOST_S, delay * 2)

    async def _read_stream(self) -> None:
        messages = self._bus.follow(subjects.OUTPUTS_STREAM, from_seq=self._next_seq, subject=self._subject, live=False)
        settled = True
        async for message in messages:
            number = await self._offer(message.data, fetched=True)
            # A plan that is still held may be shed and have to be read again.
            settled = settled and number <= self._order.last
            if settled:
                self._next_seq = message.seq + 1

    async def _heard(self, delivery: Delivery) -> None:
        sent_ns = delivery.headers.get(subjects.SENT_NS_HEADER, "")
        if sent_ns.isdigit():
            metrics.PLAN_SECONDS.observe(max(0, time.time_ns() - int(sent_ns)) / 1e9)
        await self._offer(delivery.data, fetched=False)

    async def _offer(self, data: bytes, *, fetched: bool) -> int:
        """Take one message; returns its plan's number, 0 if it is no plan for us."""
        try:
            plan = decode_published(data)
        except CodecError as error:
            _log.error("plan_unreadable", reason=error.message)
            return 0
        if not isinstance(plan, WorkerPlan):
            return 0
        async with self._turn:
            due = self._order.offer(plan)
            for each in due:
                await self._deliver(each)
        if fetched:
            metrics.PLANS_FETCHED.inc(len(due))
        elif self._order.missing is not None:
            self._wanted.set()
        return plan.number if plan.incarnation == self._order.incarnation else 0
