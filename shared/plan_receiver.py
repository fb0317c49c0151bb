"""Receipt of numbered plans: over core NATS, and from ``TC_OUTPUTS`` where one was missed.

A gap shows by a number that is too high. The last plan leaves no gap when it is lost, so the stream is
also read after each reconnection and, at long intervals, without any sign of a loss.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic

from prometheus_client import Counter, Histogram

from shared import logs, subjects
from shared.backoff import Backoff
from shared.bus.protocol import Bus, Delivery, Subscription
from shared.codec import decode_published
from shared.errors import CodecError, TransportError, Unavailable
from shared.plan_order import P, PlanOrder

_log = logs.get_logger("plan_receiver")

RESYNC_S = 5.0
RETRY_FIRST_S = 0.02
RETRY_MOST_S = 1.0
GAP_TIMEOUT_S = 30.0
"""Seconds after which a plan that the stream lacks is lost; only a new incarnation helps."""


class PlanReceiver(Generic[P]):
    """A receiver that hands each plan of this incarnation to ``deliver`` once, in order, one at a time."""

    def __init__(
        self,
        bus: Bus,
        subject: str,
        incarnation: str,
        kind: type[P],
        is_own: Callable[[P], bool],
        deliver: Callable[[P], Awaitable[None]],
        *,
        delays: Histogram,
        fetched: Counter,
        clock_s: Callable[[], float] = time.monotonic,
        resync_s: float = RESYNC_S,
    ) -> None:
        """Prepare to receive plans; :meth:`start` subscribes to ``subject``.

        Plans are those of ``kind`` for which ``is_own`` holds. ``delays`` observes the seconds from a plan's publishing
        to its arrival, ``fetched`` counts the plans that had to be read from the stream. ``resync_s`` is the pause
        after which the stream is read without a sign of a loss.
        """
        self._bus = bus
        self._subject = subject
        self._kind = kind
        self._is_own = is_own
        self._deliver = deliver
        self._clock_s = clock_s
        self._delays = delays
        self._fetched = fetched
        self._resync_s = resync_s
        self._order: PlanOrder[P] = PlanOrder(incarnation)
        self._next_seq = 1
        self._wanted = asyncio.Event()
        self._turn = asyncio.Lock()  # Plans received and plans read must not overtake one another.
        self._is_stopped = False
        self._subscription: Subscription | None = None
        self.last = 0  # Number of the last plan whose delivery has ended; 0 before the first.

    async def start(self) -> None:
        """Subscribe; call before the join is announced, so that no plan can be earlier."""
        try:
            self._next_seq = (await self._bus.stream_info(subjects.OUTPUTS_STREAM)).last_seq + 1
        except (Unavailable, TransportError) as error:
            # The scheduler may not have made the stream yet. Then it is read from its beginning.
            _log.info("outputs_not_there_yet", reason=error.message)
        self._bus.on_reconnect(self._wanted.set)
        self._subscription = await self._bus.subscribe(self._subject, self._heard)

    async def stop(self) -> None:
        """Deliver no more plans; a running delivery, of either source, finishes first."""
        self._is_stopped = True
        self._wanted.set()
        if self._subscription is not None:
            await self._subscription.close()
            self._subscription = None
        async with self._turn:
            pass

    async def run(self) -> None:
        """Read missed plans from the stream, until stopped. Raises TransportError when a gap cannot be closed.

        A cancellation that comes together with a reply of the broker can be lost in the client's wait_for, so end this
        by :meth:`stop`.
        """
        while not self._is_stopped:
            try:
                # Not wait_for: in Python 3.11 that swallows a cancellation which comes together with the event.
                async with asyncio.timeout(self._resync_s):
                    await self._wanted.wait()
            except TimeoutError:
                pass  # No plan is known to be missing; look all the same.
            self._wanted.clear()
            if self._bus.is_connected:
                await self._catch_up()

    async def _catch_up(self) -> None:
        last, since, backoff = self._order.last, self._clock_s(), Backoff(RETRY_FIRST_S, RETRY_MOST_S)
        while True:
            try:
                await self._read_stream()
            except Unavailable:
                # Without the broker nothing can be missed; the reconnection wakes us.
                return
            except TransportError as error:
                _log.warning("plans_not_read", subject=self._subject, reason=error.message)
            missing = self._order.missing
            if missing is None or self._is_stopped:
                return
            if self._order.last != last:
                # Deliveries may take long; only time without progress counts.
                last, since = self._order.last, self._clock_s()
            elif self._clock_s() - since > GAP_TIMEOUT_S:
                raise TransportError(f"plans {missing.start} to {missing.stop - 1} are nowhere to be found")
            await asyncio.sleep(backoff.next_s())

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
            self._delays.observe(max(0, time.time_ns() - int(sent_ns)) / 1e9)
        await self._offer(delivery.data, fetched=False)

    async def _offer(self, data: bytes, *, fetched: bool) -> int:
        """Take one message; return its plan's number, 0 if it is not a plan for us."""
        try:
            plan = decode_published(data)
        except CodecError as error:
            _log.error("plan_unreadable", subject=self._subject, reason=error.message)
            return 0
        if not isinstance(plan, self._kind) or not self._is_own(plan):
            return 0
        async with self._turn:
            due = self._order.offer(plan)
            for each in due:
                if self._is_stopped:
                    return each.number
                await self._deliver(each)
                self.last = each.number
        if fetched:
            self._fetched.inc(len(due))
        elif self._order.missing is not None:
            self._wanted.set()
        return plan.number if plan.incarnation == self._order.incarnation else 0
