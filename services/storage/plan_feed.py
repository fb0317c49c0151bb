"""The numbered plans of this storage, in order and without gaps, from core NATS and from ``TC_OUTPUTS``.

Plans arrive over core NATS at once; one that was lost on the way shows as a gap in the numbers, or not at all if
it was the last. So the stream is read when there is a gap, after a reconnection, and now and then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from shared import logs, subjects
from shared.bus.protocol import Bus, Delivery, Subscription
from shared.codec import decode_published
from shared.errors import CodecError, ThermoclineError
from shared.messages.storage_plans import StoragePlan
from shared.plan_order import PlanOrder

RESYNC_S = 5.0
RETRY_S = 0.2

_log = logs.get_logger("storage")


class PlanFeed:
    """Calls ``execute`` with each plan of this incarnation, once, in order of number, one at a time."""

    def __init__(
        self,
        bus: Bus,
        storage_id: str,
        incarnation: str,
        execute: Callable[[StoragePlan], Awaitable[None]],
        *,
        resync_s: float = RESYNC_S,
    ) -> None:
        self._bus = bus
        self._subject = subjects.storage_output(storage_id)
        self._storage_id = storage_id
        self._execute = execute
        self._resync_s = resync_s
        self._order: PlanOrder[StoragePlan] = PlanOrder(incarnation)
        self._turn = asyncio.Lock()  # Both sources offer plans; execution must not overtake itself.
        self._behind = asyncio.Event()
        self._next_seq = 1
        self._executed = 0
        self._stopped = False
        self._subscription: Subscription | None = None

    @property
    def last(self) -> int:
        """Number of the last plan executed; 0 before the first."""
        return self._executed

    async def start(self) -> None:
        """Subscribe; every plan published from now on is heard or found in the stream."""
        self._bus.on_reconnect(self._behind.set)
        self._subscription = await self._bus.subscribe(self._subject, self._heard)

    async def stop(self) -> None:
        """Execute no more plans; one that is being executed, wherever it came from, finishes first."""
        self._stopped = True
        if self._subscription is not None:
            await self._subscription.close()
            self._subscription = None
        async with self._turn:
            pass

    async def run(self) -> None:
        """Fetch what was missed, whenever something may have been, until cancelled."""
        while True:
            try:
                await asyncio.wait_for(self._behind.wait(), self._resync_s)
            except TimeoutError:
                pass  # A plan that nothing followed may have been lost.
            self._behind.clear()
            if not self._bus.is_connected:
                continue
            try:
                await self._catch_up()
            except ThermoclineError as error:
                _log.warning("plans_not_fetched", reason=error.message)
                await asyncio.sleep(RETRY_S)

    async def _catch_up(self) -> None:
        stored = self._bus.follow(subjects.OUTPUTS_STREAM, from_seq=self._next_seq, subject=self._subject, live=False)
        async for message in stored:
            self._next_seq = message.seq + 1
            await self._offer(message.data)

    async def _heard(self, delivery: Delivery) -> None:
        await self._offer(delivery.data)
        if self._order.missing is not None:
            self._behind.set()

    async def _offer(self, data: bytes) -> None:
        try:
            plan = decode_published(data)
        except CodecError as error:
            _log.warning("not_a_plan", reason=error.message)
            return
        if not isinstance(plan, StoragePlan) or plan.storage_id != self._storage_id:
            return
        async with self._turn:
            for due in self._order.offer(plan):
                if self._stopped:
                    return
                await self._execute(due)
                self._executed = due.number
