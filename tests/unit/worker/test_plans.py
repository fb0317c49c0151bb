"""Plans are executed in order, each once, however they are heard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.worker import plans as plans_module
from services.worker.plans import PlanReceiver
from shared import subjects
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.bus.protocol import Delivery, StreamLimits
from shared.codec import encode
from shared.errors import TransportError
from shared.messages.worker_plans import DetachHostPool, WorkerPlan


def plan(number: int, *, incarnation: str = "inc", epoch: int = 1, worker_id: str = "w") -> WorkerPlan:
    order = DetachHostPool(storage_id=f"s{number}")
    return WorkerPlan(
        worker_id=worker_id, incarnation=incarnation, number=number, epoch=epoch, cause=number, order=order
    )


class DeafBus(MemoryBus):
    """A client that core messages may miss, as they do behind a slow link."""

    is_deaf = False

    def deliver(self, delivery: Delivery) -> None:
        if not self.is_deaf:
            super().deliver(delivery)


class Cell:
    """A broker with one worker's receiver; ``lose`` publishes so that only the stream hears it."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.worker = DeafBus(self.broker, "worker")
        self.broker._clients.append(self.worker)
        self.scheduler = self.broker.connect("scheduler")
        self.got: list[int] = []
        self._came = asyncio.Condition()
        self.now = 0.0
        self.tick = 0.0  # By how much each look at the clock moves it.
        self.receiver = PlanReceiver(self.worker, "w", "inc", self._deliver, clock_s=self._clock)

    def _clock(self) -> float:
        self.now += self.tick
        return self.now

    async def _deliver(self, plan: WorkerPlan) -> None:
        await asyncio.sleep(0)  # A receiver that yields must not let plans overtake one another.
        async with self._came:
            self.got.append(plan.number)
            self._came.notify_all()

    async def publish(self, *plans: WorkerPlan) -> None:
        for each in plans:
            await self.scheduler.publish(subjects.worker_output(each.worker_id), encode(each))

    async def lose(self, *plans: WorkerPlan) -> None:
        self.worker.is_deaf = True
        await self.publish(*plans)
        self.worker.is_deaf = False

    async def until(self, count: int) -> list[int]:
        """Wait until so many plans have come."""
        async with asyncio.timeout(10), self._came:
            await self._came.wait_for(lambda: len(self.got) >= count)
        return self.got


@asynccontextmanager
async def cell() -> AsyncIterator[Cell]:
    made = Cell()
    await made.scheduler.ensure_streams(StreamLimits())
    await made.receiver.start()
    task = asyncio.create_task(made.receiver.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await made.receiver.stop()


async def test_plans_heard_are_handed_on() -> None:
    """In order, and what is for others or repeated is not."""
    async with cell() as made:
        await made.publish(plan(1), plan(2), plan(2), plan(1, incarnation="old"), plan(7, worker_id="other"), plan(3))

        assert await made.until(3) == [1, 2, 3]


async def test_a_gap_is_read_from_the_stream() -> None:
    """Plans lost on the way come out of TC_OUTPUTS before the later ones."""
    async with cell() as made:
        await made.publish(plan(1))
        await made.lose(plan(2), plan(3), plan(3, worker_id="other"))
        await made.publish(plan(4), plan(5))

        assert await made.until(5) == [1, 2, 3, 4, 5]


async def test_a_reconnection_brings_what_was_missed() -> None:
    """Even if no later plan shows the gap."""
    async with cell() as made:
        await made.publish(plan(1))
        await made.until(1)
        made.worker.disconnect()
        await made.publish(plan(2), plan(3))
        made.worker.reconnect()

        assert await made.until(3) == [1, 2, 3]


async def test_the_last_plan_lost_is_found_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing shows that it was lost, so the stream is read at intervals."""
    monkeypatch.setattr(plans_module, "RESYNC_S", 0.01)
    async with cell() as made:
        await made.lose(plan(1))

        assert await made.until(1) == [1]


async def test_plans_of_before_the_start_are_left_alone() -> None:
    """A new incarnation begins at number 1 whatever the stream holds for older ones."""
    made = Cell()
    await made.scheduler.ensure_streams(StreamLimits())
    await made.publish(*(plan(number, incarnation="old") for number in range(1, 9)))
    await made.receiver.start()
    await made.publish(plan(1))

    assert await made.until(1) == [1]
    await made.receiver.stop()


async def test_garbage_is_survived() -> None:
    """A message that is no plan is logged and passed over."""
    async with cell() as made:
        await made.scheduler.publish(subjects.worker_output("w"), b"\xc1garbage")
        await made.publish(plan(1))

        assert await made.until(1) == [1]


async def test_a_gap_that_cannot_be_closed_ends_the_incarnation() -> None:
    """The stream has forgotten the plan; only a new incarnation starts from a known state."""
    made = Cell()
    await made.scheduler.ensure_streams(StreamLimits())
    await made.receiver.start()
    task = asyncio.create_task(made.receiver.run())
    await made.lose(plan(1))
    made.broker.drop_oldest(subjects.OUTPUTS_STREAM, 1)
    made.tick = plans_module.GAP_TIMEOUT_S + 1
    await made.publish(plan(2))

    with pytest.raises(TransportError, match="1 to 1"):
        await asyncio.wait_for(task, 10)
    assert made.got == []
    await made.receiver.stop()


async def test_plans_heard_and_read_at_once_keep_their_order() -> None:
    """While the stream is being read, plans go on arriving."""
    async with cell() as made:
        await made.lose(*(plan(number) for number in range(1, 40)))
        for number in range(40, 80):
            await made.publish(plan(number))
            await asyncio.sleep(0)

        assert await made.until(79) == list(range(1, 80))
