"""Outputs are sent again until the broker has confirmed them."""

from __future__ import annotations

import asyncio

import pytest

from services.scheduler.leadership import Progress
from services.scheduler.outbox import MOST_UNCONFIRMED, Outbox
from shared import subjects
from shared.bus.protocol import Delivery, StreamLimits
from shared.codec import decode_published
from shared.errors import Unavailable
from shared.messages.gateway_notices import GatewayNotice, ResumeNeeded
from tests.memory_bus import MemoryBroker, MemoryBus
from tests.waiting import until


def notice(number: int) -> GatewayNotice:
    word = ResumeNeeded(request_id="r", attempt=number)
    return GatewayNotice(gateway_id="gw", number=number, epoch=1, cause=number, word=word)


async def connected() -> tuple[MemoryBus, Outbox]:
    bus = MemoryBroker().connect("scheduler")
    await bus.ensure_streams(StreamLimits())
    return bus, Outbox(bus, lambda: 42, lambda: True)


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
    await outbox.send([notice(1)], 1, 1)
    await outbox.confirm()
    await bus.close()
    await subscription.close()

    assert [decode_published(delivery.data) for delivery in received] == [notice(1)]
    assert received[0].headers[subjects.SENT_NS_HEADER] == "42"


async def test_nothing_is_lost_while_disconnected() -> None:
    """Outputs of that time are sent after the reconnect, in order, with nothing in between missing."""
    bus, outbox = await connected()
    await outbox.send([notice(1)], 1, 1)
    await outbox.confirm()
    bus.disconnect()
    await outbox.send([notice(2)], 2, 2)
    await outbox.send([notice(3)], 3, 3)
    waiting = outbox.unconfirmed
    bus.reconnect()
    await asyncio.wait_for(outbox.confirm(), 10)

    assert waiting == 2
    assert outbox.unconfirmed == 0
    assert await stored(bus) == [1, 2, 3]


async def test_unconfirmed_outputs_are_sent_again_after_a_reconnect() -> None:
    """What was given to the lost connection may have died with it, so it is repeated; what was confirmed is not."""
    bus, outbox = await connected()
    await outbox.send([notice(1)], 1, 1)
    await outbox.confirm()
    await outbox.send([notice(2), notice(3)], 3, 3)
    bus.disconnect()
    bus.reconnect()
    await asyncio.sleep(0)
    await outbox.send([notice(4)], 4, 4)
    await outbox.confirm()

    assert await stored(bus) == [1, 2, 3, 2, 3, 4]


async def test_unconfirmed_outputs_are_bounded() -> None:
    """Before too many wait, sending makes a round trip by itself."""
    bus, outbox = await connected()

    for number in range(1, 2 * MOST_UNCONFIRMED + 2):
        await outbox.send([notice(number)], number, number)

    assert outbox.unconfirmed < MOST_UNCONFIRMED
    assert await stored(bus) == list(range(1, 2 * MOST_UNCONFIRMED + 2))


async def test_output_beyond_the_payload_limit_does_not_block_the_others() -> None:
    """It is counted and left out; its number is missing, which its target reports."""
    bus = MemoryBroker(max_payload=200).connect("scheduler")
    await bus.ensure_streams(StreamLimits())
    outbox = Outbox(bus, lambda: 0, lambda: True)
    huge = GatewayNotice(
        gateway_id="gw", number=2, epoch=1, cause=2, word=ResumeNeeded(request_id="r" * 500, attempt=1)
    )

    await outbox.send([notice(1), huge, notice(3)], 3, 3)
    await outbox.confirm()

    assert outbox.refused == 1
    assert await stored(bus) == [1, 3]


class Standby:
    """An outbox that speaks only when told to."""

    def __init__(self) -> None:
        self.bus = MemoryBroker().connect("standby")
        self.may_speak = False
        self.outbox = Outbox(self.bus, lambda: 0, lambda: self.may_speak)

    async def fold(self, *numbers: int) -> None:
        """One output for each input, of the same number and time."""
        for number in numbers:
            await self.outbox.send([notice(number)], number, number)


async def test_silent_outbox_keeps_what_is_not_known_to_be_published() -> None:
    """Once it may speak, it says that and nothing else, in order."""
    standby = Standby()
    await standby.bus.ensure_streams(StreamLimits())
    await standby.fold(1, 2, 3)
    standby.outbox.forget(Progress(2, 2))
    await standby.fold(4)
    silent = await stored(standby.bus)
    standby.may_speak = True
    await standby.outbox.confirm()

    assert silent == []
    assert await stored(standby.bus) == [3, 4]
    assert standby.outbox.published == Progress(4, 4)


async def test_outputs_of_inputs_known_to_be_published_are_not_kept_at_all() -> None:
    """A standby that comes up from a snapshot learns first what is out, and folds it then."""
    standby = Standby()
    standby.outbox.forget(Progress(3, 3))
    await standby.fold(1, 2)
    behind = standby.outbox.published
    await standby.fold(3, 4)

    assert behind == Progress(3, 3)
    assert standby.outbox.unconfirmed == 1
    assert standby.outbox.published.covers(3, 3)
    assert not standby.outbox.published.covers(4, 4)


async def test_what_is_known_of_a_stream_that_is_no_more_drops_nothing() -> None:
    """Sequences of a stream made anew are low again, but its inputs are later."""
    standby = Standby()
    standby.outbox.forget(Progress(5000, 90))
    await standby.outbox.send([notice(1)], 1, 100)

    assert standby.outbox.unconfirmed == 1
    assert standby.outbox.published.seq == 0


async def test_inputs_without_outputs_count_as_published() -> None:
    """Otherwise a quiet cell's standby would keep its last outputs for ever."""
    standby = Standby()
    standby.may_speak = True
    await standby.bus.ensure_streams(StreamLimits())
    await standby.fold(1)
    before = standby.outbox.published
    await standby.outbox.confirm()
    await standby.outbox.send([], 2, 7)

    assert not before.covers(1, 1)
    assert standby.outbox.published == Progress(2, 7)


async def test_full_silent_outbox_stops_the_fold_until_more_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a standby keeps is bounded; it goes on where it was."""
    monkeypatch.setattr("services.scheduler.outbox.MOST_KEPT", 3)
    monkeypatch.setattr("services.scheduler.outbox.RETRY_S", 0.001)
    standby = Standby()
    looks: list[bool] = []

    def look() -> bool:
        looks.append(False)
        return False

    monkeypatch.setattr(standby.outbox, "_may_speak", look)
    folding = asyncio.create_task(standby.fold(1, 2, 3, 4))
    await until(lambda: len(looks) >= 10)  # It looks once for each of the first three, and then again and again.
    kept, waits = standby.outbox.unconfirmed, not folding.done()
    standby.outbox.forget(Progress(2, 2))
    await asyncio.wait_for(folding, 10)

    assert (kept, waits) == (3, True)
    assert standby.outbox.unconfirmed == 2


async def test_outbox_that_may_not_speak_any_more_says_nothing_further() -> None:
    """In the middle of what it has to say, too; the rest is kept."""
    standby = Standby()
    await standby.bus.ensure_streams(StreamLimits())
    await standby.fold(1, 2, 3)
    words = iter([True, True, False])
    standby.outbox._may_speak = lambda: next(words, False)
    await standby.outbox.send([], 4, 4)

    assert await stored(standby.bus) == [1, 2]
    assert standby.outbox.unconfirmed == 3


async def test_what_may_not_be_said_yet_is_unavailable() -> None:
    """Without the right to speak nothing counts as sent; with it everything up to an input is, at once."""
    standby = Standby()
    await standby.bus.ensure_streams(StreamLimits())
    await standby.fold(1, 2)

    with pytest.raises(Unavailable):
        await standby.outbox.send_up_to(1)
    await standby.outbox.send_up_to(0)
    standby.outbox._may_speak = lambda: True
    await standby.outbox.send_up_to(2)

    assert await stored(standby.bus) == [1, 2]
