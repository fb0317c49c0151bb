"""Events reach the stream in order and once, whatever the broker does."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.storage.outbox import Outbox
from shared import subjects
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.codec import decode_input
from shared.errors import Unavailable
from shared.messages.storage_events import BackupDone

SUBJECT = subjects.storage_input("s0")


def _done(number: int) -> BackupDone:
    return BackupDone(storage_id="s0", incarnation="i0", transfer_id=number, ok=True)


async def _stored(broker: MemoryBroker) -> list[int]:
    reader = broker.connect("reader")
    messages = reader.follow(subjects.INPUTS_STREAM, live=False)
    events = [decode_input(message.data) async for message in messages]
    return [event.transfer_id for event in events if isinstance(event, BackupDone)]


class _LosingBus(MemoryBus):
    """Stores every append, but loses the first acknowledgement of each."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker, "losing")
        self._seen: set[str] = set()

    async def append(self, subject: str, data: bytes, *, message_id: str = "", timeout_s: float = 5.0) -> int:
        seq = await super().append(subject, data, message_id=message_id, timeout_s=timeout_s)
        if message_id not in self._seen:
            self._seen.add(message_id)
            # The outbox tries again at once, because it takes a reconnection for a sign of recovery.
            self.disconnect()
            self.reconnect()
            raise Unavailable("the acknowledgement was lost")
        return seq


@pytest.fixture
async def bus(broker: MemoryBroker) -> AsyncIterator[MemoryBus]:
    client = broker.connect("storage")
    yield client
    await client.close()


async def test_events_of_an_outage_arrive_in_order_when_the_broker_is_back(
    broker: MemoryBroker, bus: MemoryBus
) -> None:
    """Nothing posted while disconnected is lost or overtaken."""
    outbox = Outbox(bus, SUBJECT, "i0")
    sending = asyncio.create_task(outbox.run())
    await outbox.post(_done(1))
    assert await outbox.flush(5.0)

    bus.disconnect()
    for number in (2, 3, 4):
        await outbox.post(_done(number))
    assert not await outbox.flush(0.01)
    bus.reconnect()

    assert await outbox.flush(5.0)
    assert await _stored(broker) == [1, 2, 3, 4]
    sending.cancel()


async def test_a_lost_acknowledgement_does_not_repeat_the_event(broker: MemoryBroker) -> None:
    """An append that is tried again is stored once."""
    bus = _LosingBus(broker)
    outbox = Outbox(bus, SUBJECT, "i0")
    sending = asyncio.create_task(outbox.run())

    for number in (1, 2, 3):
        await outbox.post(_done(number))

    assert await outbox.flush(10.0)
    assert await _stored(broker) == [1, 2, 3]
    sending.cancel()


async def test_a_full_outbox_makes_its_users_wait(broker: MemoryBroker, bus: MemoryBus) -> None:
    """Posting beyond the bound waits for room and then goes on."""
    outbox = Outbox(bus, SUBJECT, "i0", capacity=2)
    await outbox.post(_done(1))
    await outbox.post(_done(2))
    waiting = asyncio.create_task(outbox.post(_done(3)))
    await asyncio.sleep(0)
    assert not waiting.done()

    sending = asyncio.create_task(outbox.run())

    await asyncio.wait_for(waiting, 5.0)
    assert await outbox.flush(5.0)
    assert await _stored(broker) == [1, 2, 3]
    sending.cancel()
