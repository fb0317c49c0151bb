"""Outputs are sent again until the broker has confirmed them."""

from __future__ import annotations

import asyncio

from services.scheduler.outbox import MOST_UNCONFIRMED, Outbox
from shared import subjects
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.bus.protocol import Delivery, StreamLimits
from shared.codec import decode_published
from shared.messages.gateway_notices import GatewayNotice, ResumeNeeded


def notice(number: int) -> GatewayNotice:
    word = ResumeNeeded(request_id="r", attempt=number)
    return GatewayNotice(gateway_id="gw", number=number, epoch=1, cause=number, word=word)


async def connected() -> tuple[MemoryBus, Outbox]:
    bus = MemoryBroker().connect("scheduler")
    await bus.ensure_streams(StreamLimits())
    return bus, Outbox(bus, lambda: 42)


async def stored(bus: MemoryBus) -> list[int]:
    """Numbers in TC_OUTPUTS, in order."""
    return [decode_published(m.data).number async for m in bus.follow(subjects.OUTPUTS_STREAM, live=False)]


async def test_outputs_go_to_their_targets_with_the_time_of_sending() -> None:
    """The body holds no time; the header does."""
    bus, outbox = await connected()
    received: list[Delivery] = []

    async def handler(delivery: Delivery) -> None:
        received.append(delivery)

    subscription = await bus.subscribe("tc.out.gateway.gw", handler)
    await outbox.send([notice(1)])
    await outbox.confirm()
    await bus.close()
    await subscription.close()

    assert [decode_published(delivery.data) for delivery in received] == [notice(1)]
    assert received[0].headers[subjects.SENT_NS_HEADER] == "42"


async def test_nothing_is_lost_while_disconnected() -> None:
    """Outputs of that time are sent after the reconnect, in order, with nothing in between missing."""
    bus, outbox = await connected()
    await outbox.send([notice(1)])
    await outbox.confirm()
    bus.disconnect()
    await outbox.send([notice(2)])
    await outbox.send([notice(3)])
    waiting = outbox.unconfirmed
    bus.reconnect()
    await asyncio.wait_for(outbox.confirm(), 10)

    assert waiting == 2
    assert outbox.unconfirmed == 0
    assert await stored(bus) == [1, 2, 3]


async def test_unconfirmed_outputs_are_sent_again_after_a_reconnect() -> None:
    """What was given to the lost connection may have died with it, so it is repeated; what was confirmed is not."""
    bus, outbox = await connected()
    await outbox.send([notice(1)])
    await outbox.confirm()
    await outbox.send([notice(2), notice(3)])
    bus.disconnect()
    bus.reconnect()
    await asyncio.sleep(0)
    await outbox.send([notice(4)])
    await outbox.confirm()

    assert await stored(bus) == [1, 2, 3, 2, 3, 4]


async def test_unconfirmed_outputs_are_bounded() -> None:
    """Before too many wait, sending makes a round trip by itself."""
    bus, outbox = await connected()

    for number in range(1, 2 * MOST_UNCONFIRMED + 2):
        await outbox.send([notice(number)])

    assert outbox.unconfirmed < MOST_UNCONFIRMED
    assert await stored(bus) == list(range(1, 2 * MOST_UNCONFIRMED + 2))


async def test_output_beyond_the_payload_limit_does_not_block_the_others() -> None:
    """It is counted and left out; its number is missing, which its target reports."""
    bus = MemoryBroker(max_payload=200).connect("scheduler")
    await bus.ensure_streams(StreamLimits())
    outbox = Outbox(bus, lambda: 0)
    huge = GatewayNotice(
        gateway_id="gw", number=2, epoch=1, cause=2, word=ResumeNeeded(request_id="r" * 500, attempt=1)
    )

    await outbox.send([notice(1), huge, notice(3)])
    await outbox.confirm()

    assert outbox.refused == 1
    assert await stored(bus) == [1, 3]
