"""Published messages: order, wildcards, handlers, and bounds."""

from __future__ import annotations

import asyncio

import pytest

from shared.bus.protocol import Bus, Delivery
from shared.errors import PayloadTooLarge
from tests.conformance.brokers import MAX_PAYLOAD, Collected, World
from tests.waiting import until


async def test_subscriber_gets_messages_of_a_publisher_in_order(world: World, bus: Bus) -> None:
    """Per publisher and subject, order is kept, and headers arrive with the message."""
    other = await world.connect("second")
    collected = Collected()
    await other.subscribe("tc.tokens.*", collected)

    for number in range(200):
        await bus.publish("tc.tokens.gw", str(number).encode(), {"tc-number": str(number)})
    await until(lambda: len(collected.deliveries) == 200)

    assert collected.data == [str(number).encode() for number in range(200)]
    assert collected.deliveries[7].subject == "tc.tokens.gw"
    assert collected.deliveries[7].headers["tc-number"] == "7"


async def test_wildcards_match_whole_tokens(bus: Bus) -> None:
    """``*`` is one token, ``>`` one or more at the end. A client hears what it publishes itself."""
    expected = {"tc.tokens.a": [b"a"], "tc.tokens.*": [b"a", b"b"], "tc.>": [b"a", b"b", b"deep"], "tc.tokens": []}
    collected, everything = {pattern: Collected() for pattern in expected}, Collected()
    for pattern, handler in collected.items():
        await bus.subscribe(pattern, handler)
    await bus.subscribe(">", everything)

    await bus.publish("tc.tokens.a", b"a")
    await bus.publish("tc.tokens.b", b"b")
    await bus.publish("tc.tokens.b.c", b"deep")
    await until(lambda: len(everything.data) == 3 and sum(len(handler.data) for handler in collected.values()) >= 6)

    assert {pattern: handler.data for pattern, handler in collected.items()} == expected


async def test_handler_runs_one_message_at_a_time(bus: Bus) -> None:
    """The next message waits until the handler has finished the one before."""
    running, most, handled = 0, 0, 0

    async def handler(delivery: Delivery) -> None:
        nonlocal running, most, handled
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        handled += 1

    await bus.subscribe("tc.tokens.gw", handler)

    for _ in range(20):
        await bus.publish("tc.tokens.gw", b"")
    await until(lambda: handled == 20)

    assert most == 1


async def test_failing_handler_keeps_its_subscription(bus: Bus) -> None:
    """An exception, even a stray cancellation, costs one message and no more."""
    seen: list[bytes] = []

    async def handler(delivery: Delivery) -> None:
        seen.append(delivery.data)
        if delivery.data == b"fail":
            raise ValueError("wrong")
        if delivery.data == b"cancel":
            raise asyncio.CancelledError

    await bus.subscribe("tc.tokens.gw", handler)

    for data in (b"fail", b"cancel", b"fine"):
        await bus.publish("tc.tokens.gw", data)
    await until(lambda: len(seen) == 3)

    assert seen == [b"fail", b"cancel", b"fine"]


async def test_messages_beyond_the_pending_limit_are_dropped_and_counted(bus: Bus) -> None:
    """A slow handler loses messages visibly; the publisher never waits for it."""
    release = asyncio.Event()
    seen: list[bytes] = []
    everything = Collected()

    async def slow(delivery: Delivery) -> None:
        seen.append(delivery.data)
        await release.wait()

    subscription = await bus.subscribe("tc.tokens.gw", slow, pending_limit=5)
    await bus.subscribe("tc.tokens.gw", everything)
    await bus.publish("tc.tokens.gw", b"0")
    await until(lambda: len(seen) == 1)
    for number in range(1, 21):
        await bus.publish("tc.tokens.gw", str(number).encode())
    await until(lambda: len(everything.deliveries) == 21)
    release.set()
    await until(lambda: len(seen) == 6)

    assert subscription.dropped == 15
    assert seen == [b"0", b"1", b"2", b"3", b"4", b"5"]


async def test_closed_subscription_lets_the_running_handler_finish(bus: Bus) -> None:
    """``close`` returns when the handler that runs is done; later messages are not handled."""
    started, release = asyncio.Event(), asyncio.Event()
    finished: list[bytes] = []

    async def handler(delivery: Delivery) -> None:
        started.set()
        await release.wait()
        finished.append(delivery.data)

    subscription = await bus.subscribe("tc.tokens.gw", handler)
    await bus.publish("tc.tokens.gw", b"first")
    await asyncio.wait_for(started.wait(), 10)
    closing = asyncio.create_task(subscription.close())
    await asyncio.sleep(0)
    release.set()
    await asyncio.wait_for(closing, 10)
    await bus.publish("tc.tokens.gw", b"second")
    await bus.flush()

    assert finished == [b"first"]


async def test_handler_may_close_its_own_subscription(bus: Bus) -> None:
    """Closing from within the handler does not wait for itself."""
    seen: list[bytes] = []
    everything = Collected()

    async def once(delivery: Delivery) -> None:
        await subscription.close()
        seen.append(delivery.data)

    subscription = await bus.subscribe("tc.tokens.gw", once)
    await bus.subscribe("tc.tokens.gw", everything)

    for data in (b"1", b"2", b"3"):
        await bus.publish("tc.tokens.gw", data)
    await until(lambda: len(everything.deliveries) == 3 and len(seen) == 1)

    assert seen == [b"1"]


async def test_payload_beyond_the_limit_is_refused(bus: Bus) -> None:
    """The broker's own limit is known and applies to whatever is sent, before it is."""
    largest, too_large = b"x" * MAX_PAYLOAD, b"x" * (MAX_PAYLOAD + 1)

    await bus.publish("tc.tokens.gw", largest)

    assert bus.max_payload == MAX_PAYLOAD
    with pytest.raises(PayloadTooLarge):
        await bus.publish("tc.tokens.gw", too_large)
    with pytest.raises(PayloadTooLarge):
        bus.publish_now("tc.tokens.gw", too_large)
    with pytest.raises(PayloadTooLarge):
        await bus.keep("a.x.1", too_large)
    with pytest.raises(PayloadTooLarge):
        await bus.write_answer("0" * 32, too_large)
    with pytest.raises(PayloadTooLarge):
        await bus.append("tc.in.cell", too_large)
    with pytest.raises(PayloadTooLarge):
        await bus.call("tc.rpc.scheduler.status", too_large)


async def test_what_is_heard_comes_in_order_and_nothing_of_it_is_lost(world: World, bus: Bus) -> None:
    """A hearer is called for each message, also behind one for which it raised."""
    other = await world.connect("second")
    heard: list[Delivery] = []

    def hear(delivery: Delivery) -> None:
        heard.append(delivery)
        if delivery.data == b"7":
            raise ValueError("wrong")

    subscription = await other.hear("tc.tokens.*", hear)
    for number in range(200):
        await bus.publish("tc.tokens.gw", str(number).encode(), {"tc-number": str(number)})
    await until(lambda: len(heard) == 200)
    await subscription.close()
    await bus.publish("tc.tokens.gw", b"late")
    await bus.flush()
    await other.flush()

    assert [delivery.data for delivery in heard] == [str(number).encode() for number in range(200)]
    assert heard[8].headers["tc-number"] == "8"
    assert subscription.dropped == 0


async def test_what_is_published_now_keeps_its_place(world: World, bus: Bus) -> None:
    """Behind what was published before it, which may not have left yet, and before what is published later."""
    other = await world.connect("second")
    collected = Collected()
    await other.subscribe("tc.tokens.gw", collected)

    for number in range(0, 200, 2):
        await bus.publish("tc.tokens.gw", str(number).encode())
        assert bus.publish_now("tc.tokens.gw", str(number + 1).encode())
    await until(lambda: len(collected.deliveries) == 200)

    assert collected.data == [str(number).encode() for number in range(200)]
