"""Plans are executed in order, each once, however they are heard, and none stays lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from prometheus_client import Counter, Histogram

from shared import subjects
from shared.bus.protocol import Delivery, StreamLimits
from shared.codec import encode
from shared.errors import TransportError
from shared.messages.storage_plans import DetachDevicePool, StoragePlan
from shared.messages.worker_plans import DetachHostPool, WorkerPlan
from shared.plan_receiver import GAP_TIMEOUT_S, RESYNC_S, PlanReceiver
from tests.memory_bus import MemoryBroker, MemoryBus
from tests.waiting import until

SUBJECT = subjects.worker_output("w")


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

    def __init__(self, *, resync_s: float = RESYNC_S) -> None:
        self.broker = MemoryBroker()
        self.worker = DeafBus(self.broker, "worker")
        self.broker._clients.append(self.worker)
        self.scheduler = self.broker.connect("scheduler")
        self.got: list[int] = []
        self._came = asyncio.Condition()
        self.now = 0.0
        self.tick = 0.0  # By how much each look at the clock moves it.
        self.gate = asyncio.Event()  # Deliveries wait for it.
        self.gate.set()
        self.entered = asyncio.Event()  # A delivery has begun.
        self.looks = 0  # How often the receiver has asked for the time, which it does whenever it reads the stream.
        self.delays = Histogram("delays", "Of this test alone", registry=None)
        self.fetched = Counter("fetched", "Of this test alone", registry=None)
        self.receiver = PlanReceiver(
            self.worker,
            SUBJECT,
            "inc",
            WorkerPlan,
            lambda plan: plan.worker_id == "w",
            self._deliver,
            delays=self.delays,
            fetched=self.fetched,
            clock_s=self._clock,
            resync_s=resync_s,
        )

    def _clock(self) -> float:
        self.looks += 1
        self.now += self.tick
        return self.now

    async def _deliver(self, plan: WorkerPlan) -> None:
        await asyncio.sleep(0)  # A receiver that yields must not let plans overtake one another.
        self.entered.set()
        await self.gate.wait()
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
async def running(made: Cell) -> AsyncIterator[Cell]:
    task = asyncio.create_task(made.receiver.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await made.receiver.stop()


@asynccontextmanager
async def cell(*, resync_s: float = RESYNC_S) -> AsyncIterator[Cell]:
    made = Cell(resync_s=resync_s)
    await made.scheduler.ensure_streams(StreamLimits())
    await made.receiver.start()
    async with running(made):
        yield made


async def test_plans_heard_are_handed_on_and_what_is_no_plan_of_ours_is_passed_over() -> None:
    """Whatever somebody publishes on our subject: other incarnations' and targets', other kinds of plans, garbage."""
    other_kind = StoragePlan(
        storage_id="w", incarnation="inc", number=2, epoch=1, cause=1,
        order=DetachDevicePool(worker_id="w", worker_incarnation="inc"),
    )  # fmt: skip
    async with cell() as made:
        await made.publish(plan(1), plan(1), plan(2, incarnation="old"))
        for stray in (plan(2, worker_id="other"), other_kind):
            await made.scheduler.publish(SUBJECT, encode(stray))
        await made.scheduler.publish(SUBJECT, b"nonsense")
        await made.publish(plan(2), plan(1), plan(3))

        assert await made.until(3) == [1, 2, 3]
    assert made.receiver.last == 3


async def test_a_gap_is_read_from_the_stream() -> None:
    """Plans lost on the way come out of TC_OUTPUTS before the later ones."""
    async with cell() as made:
        await made.publish(plan(1))
        await made.lose(plan(2), plan(3), plan(3, worker_id="other"))
        await made.publish(plan(4), plan(5))

        assert await made.until(5) == [1, 2, 3, 4, 5]


async def test_a_reconnection_brings_what_was_missed() -> None:
    """Even if no later plan shows the gap."""
    async with cell(resync_s=600.0) as made:
        await made.publish(plan(1))
        await made.until(1)
        made.worker.disconnect()
        await made.publish(plan(2), plan(3))
        made.worker.reconnect()

        assert await made.until(3) == [1, 2, 3]


async def test_the_last_plan_lost_is_found_in_time() -> None:
    """Nothing shows that it was lost, so the stream is read at intervals."""
    async with cell(resync_s=0.01) as made:
        await made.lose(plan(1))

        assert await made.until(1) == [1]
    assert made.fetched._value.get() == 1


async def test_plans_of_before_the_start_are_left_alone() -> None:
    """A new incarnation begins at number 1 whatever the stream holds for older ones."""
    made = Cell()
    await made.scheduler.ensure_streams(StreamLimits())
    await made.publish(*(plan(number, incarnation="old") for number in range(1, 9)))
    await made.receiver.start()
    await made.publish(plan(1))

    assert await made.until(1) == [1]
    await made.receiver.stop()


async def test_a_start_before_the_stream_is_made_loses_nothing() -> None:
    """The scheduler may come up later; the stream is looked for until it is there, and then read."""
    made = Cell(resync_s=0.01)
    await made.receiver.start()
    async with running(made):
        await until(lambda: made.looks >= 2)
        await made.scheduler.ensure_streams(StreamLimits())
        await made.lose(plan(1), plan(2))

        assert await made.until(2) == [1, 2]


async def test_a_gap_that_cannot_be_closed_ends_the_incarnation() -> None:
    """The stream has forgotten the plan; only a new incarnation starts from a known state."""
    made = Cell()
    await made.scheduler.ensure_streams(StreamLimits())
    await made.receiver.start()
    task = asyncio.create_task(made.receiver.run())
    await made.lose(plan(1))
    made.broker.drop_oldest(subjects.OUTPUTS_STREAM, 1)
    made.tick = GAP_TIMEOUT_S + 1
    await made.publish(plan(2))

    with pytest.raises(TransportError, match="1 to 1"):
        await asyncio.wait_for(task, 10)
    assert made.got == []
    await made.receiver.stop()


async def test_slow_deliveries_are_not_taken_for_a_gap() -> None:
    """Time in which plans were handed on does not count, even if another gap is there by then."""
    made = Cell()
    await made.scheduler.ensure_streams(StreamLimits())
    await made.receiver.start()
    made.gate.clear()
    async with running(made):
        await made.lose(plan(1))
        await made.publish(plan(2))
        async with asyncio.timeout(10):
            await made.entered.wait()
        await made.lose(plan(3))
        await made.publish(plan(4))
        made.now += GAP_TIMEOUT_S + 1
        made.gate.set()

        assert await made.until(4) == [1, 2, 3, 4]


async def test_a_gap_without_a_stream_ends_the_incarnation() -> None:
    """A stream that is not there cannot close the gap either."""
    made = Cell()
    await made.receiver.start()
    task = asyncio.create_task(made.receiver.run())
    made.tick = GAP_TIMEOUT_S + 1
    await made.publish(plan(2))

    with pytest.raises(TransportError, match="1 to 1"):
        await asyncio.wait_for(task, 10)
    await made.receiver.stop()


async def test_plans_heard_and_read_at_once_keep_their_order() -> None:
    """While the stream is being read, plans go on arriving."""
    async with cell() as made:
        await made.lose(*(plan(number) for number in range(1, 40)))
        for number in range(40, 80):
            await made.publish(plan(number))
            await asyncio.sleep(0)

        assert await made.until(79) == list(range(1, 80))


async def test_nothing_is_handed_on_after_stop() -> None:
    """Neither what is published then nor what the stream still holds."""
    async with cell(resync_s=0.01) as made:
        await made.publish(plan(1))
        await made.until(1)
        await made.receiver.stop()
        await made.publish(plan(2), plan(3))
        await made.receiver.run()  # It ends at once, and reads nothing more.

        assert made.got == [1]
        assert made.receiver.last == 1


async def test_stop_waits_for_the_delivery_under_way() -> None:
    """And plans that were due behind it are not delivered any more."""
    async with cell(resync_s=0.01) as made:
        made.gate.clear()
        await made.lose(plan(1), plan(2))
        await made.publish(plan(3))
        async with asyncio.timeout(10):
            await made.entered.wait()
        stopping = asyncio.create_task(made.receiver.stop())
        await asyncio.sleep(0)
        assert not stopping.done()
        made.gate.set()
        await asyncio.wait_for(stopping, 10)

        assert made.got == [1]
        assert made.receiver.last == 1


async def test_the_delay_of_a_plan_is_measured() -> None:
    """From the moment of sending, which the scheduler writes into a header."""
    async with cell() as made:
        header = {subjects.SENT_NS_HEADER: "1"}
        await made.scheduler.publish(SUBJECT, encode(plan(1)), header)
        await made.until(1)

    assert made.delays._sum.get() > 1e9


async def test_a_stop_ends_the_reading_without_a_cancellation() -> None:
    """A cancellation can be lost in a call to the broker; who leaves then must not wait for ever."""
    cell = Cell(resync_s=600.0)
    await cell.receiver.start()
    reading = asyncio.create_task(cell.receiver.run())

    await cell.receiver.stop()

    async with asyncio.timeout(20):
        await reading
