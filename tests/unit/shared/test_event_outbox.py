"""Events reach the stream in order, each once, through outages and lost acknowledgements."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from prometheus_client import Gauge

from shared import event_outbox, subjects
from shared.bus.protocol import StreamLimits
from shared.codec import decode_input
from shared.errors import InternalError, PayloadTooLarge, TransportError, Unavailable
from shared.event_outbox import DEDUPLICATION_S, EventOutbox
from shared.messages.storage_events import BackupDone
from tests.memory_bus import MemoryBroker, MemoryBus

SUBJECT = subjects.storage_input("s0")


def event(number: int, error: str = "") -> BackupDone:
    return BackupDone(storage_id="s0", incarnation="inc", transfer_id=number, ok=not error, error=error)


async def connected() -> tuple[MemoryBroker, MemoryBus]:
    broker = MemoryBroker()
    bus = broker.connect("storage")
    await bus.ensure_streams(StreamLimits())
    return broker, bus


def stored(broker: MemoryBroker) -> list[int]:
    messages = [decode_input(message.data) for message in broker.stream(subjects.INPUTS_STREAM).messages]
    return [message.transfer_id for message in messages if isinstance(message, BackupDone)]


def a_gauge() -> Gauge:
    return Gauge("waiting", "Of this test alone", registry=None)


def make_outbox(
    bus: MemoryBus, *, capacity: int = 100, now: list[float] | None = None, gauge: Gauge | None = None
) -> EventOutbox:
    clock = now or [0.0]
    return EventOutbox(bus, SUBJECT, "inc", capacity=capacity, waiting=gauge or a_gauge(), clock_s=lambda: clock[0])


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
        for number in range(50):
            outbox.put(event(number))

        assert await outbox.drained(5)
    assert stored(broker) == list(range(50))
    assert outbox.stored_seq == 50


async def test_events_of_an_outage_are_stored_afterwards() -> None:
    """Nothing is lost, reordered or overtaken while the broker is away, however it was put in."""
    broker, bus = await connected()
    outbox = make_outbox(bus)
    async with running(outbox):
        outbox.put(event(0))
        assert await outbox.drained(5)
        bus.disconnect()
        for number in range(1, 30, 2):
            outbox.put(event(number))
            await outbox.put_when_room(event(number + 1))
        assert not await outbox.drained(0.01)
        assert stored(broker) == [0]
        bus.reconnect()

        assert await outbox.drained(5)
    assert stored(broker) == list(range(31))


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
    bus = LosesAcknowledgements(broker, "storage")
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


class DisconnectsOnce(MemoryBus):
    """Stores every append, but loses the connection before the first acknowledgement of each."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker, "losing")
        self._seen: set[str] = set()

    async def append(self, subject: str, data: bytes, *, message_id: str = "", timeout_s: float = 5.0) -> int:
        seq = await super().append(subject, data, message_id=message_id, timeout_s=timeout_s)
        if message_id not in self._seen:
            self._seen.add(message_id)
            self.disconnect()
            self.reconnect()
            raise Unavailable("the acknowledgement was lost")
        return seq


async def test_a_reconnection_is_a_sign_to_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait between tries ends with it, and what was stored already is not stored again."""
    monkeypatch.setattr(event_outbox, "RETRY_FIRST_S", 600.0)
    broker = MemoryBroker()
    bus = DisconnectsOnce(broker)
    await bus.ensure_streams(StreamLimits())
    outbox = make_outbox(bus)
    async with running(outbox):
        for number in (1, 2, 3):
            await outbox.put_when_room(event(number))

        assert await outbox.drained(10)
    assert stored(broker) == [1, 2, 3]


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


async def test_an_equal_event_stored_before_is_no_earlier_try() -> None:
    """Two events of the same words are both stored, even if the second one's fate was unknown for long."""
    broker, bus = await connected()
    now = [0.0]
    outbox = make_outbox(bus, now=now)
    async with running(outbox):
        outbox.put(event(0))
        await outbox.drained(5)
        bus.disconnect()
        outbox.put(event(0))
        assert not await outbox.drained(0.01)
        now[0] = DEDUPLICATION_S + 1
        bus.reconnect()

        assert await outbox.drained(5)
    assert stored(broker) == [0, 0]


async def test_events_wait_for_the_stream_to_be_made() -> None:
    """A process may be started before the scheduler, even long before it."""
    broker = MemoryBroker()
    bus = broker.connect("storage")
    now = [0.0]
    outbox = make_outbox(bus, now=now)
    async with running(outbox) as task:
        outbox.put(event(0))
        assert not await outbox.drained(0.01)
        now[0] = DEDUPLICATION_S + 1  # From now on the outbox looks into a stream that is not there.
        assert not await outbox.drained(0.1)
        assert not task.done()
        await bus.ensure_streams(StreamLimits())

        assert await outbox.drained(5)
    assert stored(broker) == [0]


class Refuses(MemoryBus):
    """Fails the next ``refuse`` appends in a way that says nothing about the connection."""

    refuse = 0

    async def append(self, subject: str, data: bytes, *, message_id: str = "", timeout_s: float = 5.0) -> int:
        if self.refuse:
            self.refuse -= 1
            raise TransportError("acknowledged in words unknown")
        return await super().append(subject, data, message_id=message_id, timeout_s=timeout_s)


async def test_a_broker_that_fails_otherwise_is_tried_again() -> None:
    """Only an event that is too large can never be stored."""
    broker = MemoryBroker()
    bus = Refuses(broker, "storage")
    await bus.ensure_streams(StreamLimits())
    bus.refuse = 2
    outbox = make_outbox(bus)
    async with running(outbox):
        outbox.put(event(0))
        outbox.put(event(1))

        assert await outbox.drained(5)
    assert stored(broker) == [0, 1]


async def test_the_outbox_is_bounded() -> None:
    """One event too many is an error for the caller, not a silent loss."""
    _, bus = await connected()
    outbox = make_outbox(bus, capacity=2)
    outbox.put(event(0))
    outbox.put(event(1))

    with pytest.raises(InternalError, match="would be lost"):
        outbox.put(event(2))
    assert len(outbox) == 2


async def test_a_full_outbox_makes_its_users_wait() -> None:
    """Who can wait for room gets it, in the order of asking."""
    broker, bus = await connected()
    outbox = make_outbox(bus, capacity=2)
    await outbox.put_when_room(event(1))
    await outbox.put_when_room(event(2))
    waiting = [asyncio.create_task(outbox.put_when_room(event(number))) for number in (3, 4, 5)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    assert len(outbox) == 2

    async with running(outbox):
        await asyncio.wait_for(asyncio.gather(*waiting), 5)
        assert await outbox.drained(5)
    assert stored(broker) == [1, 2, 3, 4, 5]


async def test_the_gauge_shows_what_waits() -> None:
    """Up with each event put in, down with each stored."""
    _, bus = await connected()
    gauge = a_gauge()
    outbox = make_outbox(bus, gauge=gauge)
    outbox.put(event(0))
    outbox.put(event(1))
    before = gauge._value.get()
    async with running(outbox):
        await outbox.drained(5)

    assert (before, gauge._value.get()) == (2, 0)


async def test_an_event_that_can_never_be_stored_ends_the_process() -> None:
    """Waiting would not help."""
    broker = MemoryBroker(max_payload=64)
    bus = broker.connect("storage")
    await bus.ensure_streams(StreamLimits())
    outbox = make_outbox(bus)
    outbox.put(event(0, error="x" * 100))

    with pytest.raises(PayloadTooLarge):
        await outbox.run()
