"""Events reach the stream in order, each once, through outages and lost acknowledgements."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.worker.outbox import DEDUPLICATION_S, EventOutbox
from shared import subjects
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.bus.protocol import StreamLimits
from shared.codec import decode_input
from shared.errors import InternalError, PayloadTooLarge, Unavailable
from shared.messages.worker_events import BatchDone


def event(plan: int) -> BatchDone:
    return BatchDone(worker_id="w", incarnation="inc", plan=plan)


async def connected() -> tuple[MemoryBroker, MemoryBus]:
    broker = MemoryBroker()
    bus = broker.connect("worker")
    await bus.ensure_streams(StreamLimits())
    return broker, bus


def stored(broker: MemoryBroker) -> list[int]:
    messages = [decode_input(message.data) for message in broker.stream(subjects.INPUTS_STREAM).messages]
    return [message.plan for message in messages if isinstance(message, BatchDone)]


def make_outbox(bus: MemoryBus, *, capacity: int = 100, now: list[float] | None = None) -> EventOutbox:
    clock = now or [0.0]
    return EventOutbox(bus, "w", "inc", capacity=capacity, clock_s=lambda: clock[0])


@asynccontextmanager
async def running(outbox: EventOutbox) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(outbox.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_events_are_stored_in_order() -> None:
    """The stream has them as they were put, and the outbox knows the last sequence."""
    broker, bus = await connected()
    outbox = make_outbox(bus)
    async with running(outbox):
        for plan in range(50):
            outbox.put(event(plan))

        assert await outbox.drained(5)
    assert stored(broker) == list(range(50))
    assert outbox.stored_seq == 50


async def test_events_of_an_outage_are_stored_afterwards() -> None:
    """Nothing is lost or reordered while the broker is away."""
    broker, bus = await connected()
    outbox = make_outbox(bus)
    async with running(outbox):
        outbox.put(event(0))
        await outbox.drained(5)
        bus.disconnect()
        for plan in range(1, 30):
            outbox.put(event(plan))
        assert not await outbox.drained(0.01)
        assert stored(broker) == [0]
        bus.reconnect()

        assert await outbox.drained(5)
    assert stored(broker) == list(range(30))


class LosesAcknowledgements(MemoryBus):
    """Stores the next ``lose`` appends without saying so."""

    lose = 0

    def __init__(self, broker: MemoryBroker, name: str) -> None:
        super().__init__(broker, name)
        self.lost = asyncio.Event()

    async def append(self, subject: str, data: bytes, *, message_id: str = "", timeout_s: float = 5.0) -> int:
        seq = await super().append(subject, data, message_id=message_id, timeout_s=timeout_s)
        if self.lose:
            self.lose -= 1
            self.lost.set()
            raise Unavailable("no acknowledgement came in time")
        return seq


async def lossy() -> tuple[MemoryBroker, LosesAcknowledgements]:
    broker = MemoryBroker()
    bus = LosesAcknowledgements(broker, "worker")
    await bus.ensure_streams(StreamLimits())
    return broker, bus


async def test_a_lost_acknowledgement_stores_nothing_twice() -> None:
    """The message id makes the repetition harmless."""
    broker, bus = await lossy()
    bus.lose = 3
    outbox = make_outbox(bus)
    async with running(outbox):
        outbox.put(event(0))
        outbox.put(event(1))

        assert await outbox.drained(5)
    assert stored(broker) == [0, 1]


async def test_an_event_of_unknown_fate_is_looked_for_when_ids_may_be_forgotten() -> None:
    """After the deduplication window the stream itself says whether the event is there."""
    broker, bus = await lossy()
    bus.lose = 1
    now = [0.0]
    outbox = make_outbox(bus, now=now)
    outbox.put(event(0))
    async with running(outbox):
        await bus.lost.wait()
        now[0] = DEDUPLICATION_S + 1
        broker.stream(subjects.INPUTS_STREAM).seen.clear()
        outbox.put(event(1))

        assert await outbox.drained(5)
    assert stored(broker) == [0, 1]
    assert outbox.stored_seq == 2


async def test_the_outbox_is_bounded() -> None:
    """One event too many is an error for the caller, not a silent loss."""
    _, bus = await connected()
    outbox = make_outbox(bus, capacity=2)
    outbox.put(event(0))
    outbox.put(event(1))

    with pytest.raises(InternalError, match="would be lost"):
        outbox.put(event(2))


async def test_an_event_that_can_never_be_stored_ends_the_worker() -> None:
    """Waiting would not help."""
    broker = MemoryBroker(max_payload=64)
    bus = broker.connect("worker")
    await bus.ensure_streams(StreamLimits())
    outbox = make_outbox(bus)
    outbox.put(BatchDone(worker_id="w", incarnation="inc", plan=1, failed=("x" * 100,)))

    with pytest.raises(PayloadTooLarge):
        await outbox.run()
