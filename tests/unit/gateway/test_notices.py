"""Notices of the scheduler: each is acted on once and in order, also while nobody can read the broker's streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.gateway.dispatcher import Dispatcher
from services.gateway.notices import NoticeHandler
from services.gateway.pending import Choice, Generation, PendingTable
from shared import subjects
from shared.bus.protocol import Delivery, StreamLimits, StreamMessage
from shared.codec import encode
from shared.errors import ThermoclineError, TransportError, Unavailable
from shared.membership import SUPERSEDED_MOST
from shared.messages.gateway_notices import GatewayNotice, RequestFailed
from tests.memory_bus import MemoryBroker, MemoryBus
from tests.scripted_cell import submit
from tests.waiting import until

SUBJECT = subjects.gateway_output("gw")


class ElectingBus(MemoryBus):
    """A client whose broker takes and delivers messages, but lets nobody read streams while ``fault`` is set."""

    fault: ThermoclineError | None = None
    asked: int = 0
    may_read: asyncio.Event

    async def follow(
        self, stream: str, *, from_seq: int = 1, subject: str = ">", live: bool = True
    ) -> AsyncIterator[StreamMessage]:
        self.asked += 1
        await self.may_read.wait()
        if self.fault is not None:
            raise self.fault
        async for message in super().follow(stream, from_seq=from_seq, subject=subject, live=live):
            yield message


class Handled:
    """A handler with requests named ``r1`` to ``r9``, of which notice ``n`` says that ``rn`` failed."""

    def __init__(self) -> None:
        broker = MemoryBroker()
        self.bus = ElectingBus(broker, "gateway")
        self.bus.may_read = asyncio.Event()
        self.bus.may_read.set()
        broker.ensure_streams(StreamLimits(max_bytes=2**20))
        self.broker = broker
        pending = PendingTable()
        self._choices = [Choice(submit(f"r{number}", [1]), 0, 0, now_s=0.0) for number in range(1, 10)]
        pending.add(Generation(self._choices))
        self.handler = NoticeHandler(self.bus, "gw", Dispatcher(self.bus, subjects.request_input("gw"), "gw", pending))

    def store(self, *numbers: int, request: str = "") -> list[Delivery]:
        """Publish notices; what is returned has not reached the gateway."""
        deliveries = []
        for number in numbers:
            word = RequestFailed(request_id=request or f"r{number}", code="queue_full", message=f"{number}")
            notice = GatewayNotice(gateway_id="gw", number=number, epoch=1, cause=number, word=word)
            deliveries.append(Delivery(SUBJECT, encode(notice), {}))
            self.broker.publish(deliveries[-1])
        return deliveries

    @property
    def failed(self) -> list[int]:
        """The notices that were acted on."""
        return [number for number, choice in enumerate(self._choices, start=1) if choice.failure is not None]


@pytest.fixture
def handled() -> Handled:
    return Handled()


async def test_what_was_missed_is_read_from_the_stream(handled: Handled) -> None:
    """The third notice arrives, the first two did not."""
    handled.store(1, 2)
    (third,) = handled.store(3)

    await handled.handler.on_notice(third)
    await handled.handler.on_notice(third)

    assert (handled.failed, handled.handler.cursor.last) == ([1, 2, 3], 3)


async def test_nothing_is_given_up_while_the_stream_cannot_be_read(handled: Handled) -> None:
    """The notice that shows the gap waits in the stream with those before it; the next reading acts on all."""
    handled.store(1, 2)
    (third,) = handled.store(3)
    handled.bus.fault = Unavailable("a leader is being elected")

    await handled.handler.on_notice(third)
    meanwhile = handled.failed
    handled.bus.fault = None
    was_read = await handled.handler.catch_up()

    assert (meanwhile, was_read, handled.failed) == ([], True, [1, 2, 3])


async def test_a_stream_that_is_gone_is_not_waited_for(handled: Handled) -> None:
    """It never comes back: what arrives is acted on, though something before it is lost."""
    (first,) = handled.store(1)
    (third,) = handled.store(3)
    handled.bus.fault = TransportError("there is no stream")

    await handled.handler.on_notice(first)
    await handled.handler.on_notice(third)

    assert (handled.failed, handled.handler.cursor.last) == ([1, 3], 3)


async def test_what_the_stream_no_longer_has_is_not_waited_for(handled: Handled) -> None:
    """The second notice was trimmed away."""
    (first,) = handled.store(1)
    handled.store(2)
    handled.broker.drop_oldest(subjects.OUTPUTS_STREAM, 2)
    (third,) = handled.store(3)

    await handled.handler.on_notice(first)
    await handled.handler.on_notice(third)

    assert (handled.failed, handled.handler.cursor.last) == ([1, 3], 3)


async def test_the_next_notice_does_not_wait_for_a_reading(handled: Handled) -> None:
    """A reading hangs, as one does while servers elect; what comes in order is acted on all the same, and once."""
    handled.bus.may_read.clear()
    reading = asyncio.create_task(handled.handler.catch_up())
    await until(lambda: handled.bus.asked == 1)

    for delivery in handled.store(1, 2):
        await handled.handler.on_notice(delivery)
    meanwhile = handled.failed
    handled.bus.may_read.set()

    assert await reading
    assert (meanwhile, handled.failed, handled.handler.cursor.last) == ([1, 2], [1, 2], 2)


@pytest.mark.parametrize("statuses", [SUPERSEDED_MOST - 1, SUPERSEDED_MOST])
async def test_notices_begin_again_where_streams_and_schedulers_were_lost(handled: Handled, statuses: int) -> None:
    """Epochs and numbers begin at 1 again then. A few older statuses are those of a superseded scheduler."""
    for delivery in handled.store(1, 2, 3):
        await handled.handler.on_notice(delivery)
    await handled.handler.catch_up()
    handled.broker.lose_store()
    handled.broker.ensure_streams(StreamLimits(max_bytes=2**20))
    handled.store(1, request="r4")

    for _ in range(statuses):
        handled.handler.see(epoch=1, seq=1)
    await handled.handler.catch_up()

    assert handled.failed == ([1, 2, 3, 4] if statuses == SUPERSEDED_MOST else [1, 2, 3])


async def test_a_stream_that_was_made_anew_is_read_from_its_beginning(handled: Handled) -> None:
    """A scheduler that lived on numbers in a higher epoch, and the new stream is shorter than the old one was."""
    for delivery in handled.store(1, 2, 3):
        await handled.handler.on_notice(delivery)
    await handled.handler.catch_up()
    handled.broker.lose_store()
    handled.broker.ensure_streams(StreamLimits(max_bytes=2**20))
    word = RequestFailed(request_id="r4", code="queue_full", message="4")
    notice = GatewayNotice(gateway_id="gw", number=1, epoch=2, cause=1, word=word)
    handled.broker.publish(Delivery(SUBJECT, encode(notice), {}))

    await handled.handler.catch_up()

    assert handled.failed == [1, 2, 3, 4]
