"""Plans are executed in order, once, and none stays lost."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.storage.plan_feed import PlanFeed
from shared import subjects
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.codec import encode
from shared.messages.storage_plans import DetachDevicePool, StoragePlan


class _Listener:
    """A feed whose plans are noted."""

    def __init__(self, bus: MemoryBus, *, resync_s: float = 60.0) -> None:
        self.numbers: list[int] = []
        self._changed = asyncio.Event()
        self.feed = PlanFeed(bus, "s0", "i0", self._note, resync_s=resync_s)

    async def _note(self, plan: StoragePlan) -> None:
        await asyncio.sleep(0)
        self.numbers.append(plan.number)
        self._changed.set()

    async def reaches(self, number: int) -> list[int]:
        async with asyncio.timeout(10.0):
            while self.feed.last < number:
                self._changed.clear()
                await self._changed.wait()
        return self.numbers


def _plan(number: int, *, incarnation: str = "i0", storage_id: str = "s0") -> StoragePlan:
    order = DetachDevicePool(worker_id=f"w{number}", worker_incarnation="i")
    return StoragePlan(
        storage_id=storage_id, incarnation=incarnation, number=number, epoch=1, cause=number, order=order
    )


@pytest.fixture
async def scheduler(broker: MemoryBroker) -> MemoryBus:
    return broker.connect("scheduler")


@pytest.fixture
async def bus(broker: MemoryBroker) -> AsyncIterator[MemoryBus]:
    client = broker.connect("storage")
    yield client
    await client.close()


async def _publish(scheduler: MemoryBus, *plans: StoragePlan) -> None:
    for plan in plans:
        await scheduler.publish(subjects.storage_output("s0"), encode(plan))


async def test_plans_come_in_order_and_once(scheduler: MemoryBus, bus: MemoryBus) -> None:
    """Repeats, other incarnations, other storages and bytes that are no plan are passed over."""
    listener = _Listener(bus)
    await listener.feed.start()

    await _publish(scheduler, _plan(1), _plan(1), _plan(2, incarnation="i-old"), _plan(2, storage_id="s9"))
    await scheduler.publish(subjects.storage_output("s0"), b"nonsense")
    await _publish(scheduler, _plan(2), _plan(1), _plan(3))

    assert await listener.reaches(3) == [1, 2, 3]


async def test_a_gap_is_filled_from_the_stream(scheduler: MemoryBus, bus: MemoryBus) -> None:
    """Plans lost on core NATS are fetched as soon as a later one is heard."""
    listener = _Listener(bus)
    await listener.feed.start()
    fetching = asyncio.create_task(listener.feed.run())
    await _publish(scheduler, _plan(1))
    await listener.reaches(1)
    await listener.feed.stop()
    await _publish(scheduler, _plan(2), _plan(3))
    second = _Listener(bus)
    await second.feed.start()
    fetching_again = asyncio.create_task(second.feed.run())

    await _publish(scheduler, _plan(4))

    assert await second.reaches(4) == [1, 2, 3, 4]
    assert listener.numbers == [1]
    fetching.cancel()
    fetching_again.cancel()


async def test_the_last_plan_of_an_outage_is_fetched_on_return(scheduler: MemoryBus, bus: MemoryBus) -> None:
    """A plan published while we were cut off is executed after the reconnection, with no later plan to hint at it."""
    listener = _Listener(bus)
    await listener.feed.start()
    fetching = asyncio.create_task(listener.feed.run())
    await _publish(scheduler, _plan(1))
    await listener.reaches(1)

    bus.disconnect()
    await _publish(scheduler, _plan(2))
    bus.reconnect()

    assert await listener.reaches(2) == [1, 2]
    fetching.cancel()


async def test_a_silent_loss_is_found_in_time(scheduler: MemoryBus, bus: MemoryBus) -> None:
    """Even without a gap or a reconnection the stream is read now and then."""
    await _publish(scheduler, _plan(1))
    listener = _Listener(bus, resync_s=0.01)
    fetching = asyncio.create_task(listener.feed.run())

    assert await listener.reaches(1) == [1]
    fetching.cancel()


async def test_nothing_is_executed_after_stop(scheduler: MemoryBus, bus: MemoryBus) -> None:
    """Stop waits for the plan under way, and then neither source executes another."""
    listener = _Listener(bus, resync_s=0.01)
    await listener.feed.start()
    fetching = asyncio.create_task(listener.feed.run())
    await listener.feed.stop()

    await _publish(scheduler, _plan(1))
    await asyncio.sleep(0.05)

    assert listener.numbers == []
    fetching.cancel()
