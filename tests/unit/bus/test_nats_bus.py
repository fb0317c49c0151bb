"""What only the NATS bus has: waits between reconnects, and clients that replace a broken one."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import nats.errors
import pytest

from shared.bus.access import from_urls
from shared.bus.client import Client, Transport, denied_subject
from shared.bus.connection import RECONNECT_MOST_S, reconnect_delay_s
from shared.bus.nats_bus import NatsBus, connect
from shared.bus.protocol import Delivery, StreamLimits
from shared.errors import Unavailable
from shared.metrics import REGISTRY
from tests.nats_server import NatsServer
from thermocline.supervisor.ports import free_port


def test_reconnect_wait_grows_is_spread_and_bounded() -> None:
    """Waits double up to a bound, and chance moves them within the upper half."""
    shortest = [reconnect_delay_s(attempt, 0.0) for attempt in range(100)]
    longest = [reconnect_delay_s(attempt, 1.0) for attempt in range(100)]

    assert shortest == sorted(shortest)
    assert shortest[1] == 2 * shortest[0]
    assert max(longest) == RECONNECT_MOST_S
    assert all(least * 2 == most for least, most in zip(shortest, longest, strict=True))


@pytest.mark.parametrize("verb", ["Publish", "Subscription"])
def test_denied_subjects_are_counted_from_0(verb: str) -> None:
    """The series of both verbs are there before the broker denies anything, so that an alert sees the first time."""
    denied = denied_subject(nats.errors.Error(f'nats: permissions violation for {verb} to "tc.in.cell"'))
    assert denied is not None

    assert REGISTRY.get_sample_value("thermocline_bus_permissions_denied_total", {"verb": denied[0]}) is not None


async def test_connect_gives_up_in_time() -> None:
    """Nobody listens: Unavailable, not an endless wait."""
    with pytest.raises(Unavailable, match="no broker answers"):
        await connect([f"nats://127.0.0.1:{free_port()}"], "test", timeout_s=0.3)


async def test_new_client_takes_over_after_a_protocol_error(nats_server: NatsServer) -> None:
    """The server ends a connection with -ERR, which nats-py does not survive; subscriptions and followers do."""
    bus = NatsBus(from_urls([nats_server.url]), "test")
    await bus.open(10.0)
    await bus.ensure_streams(StreamLimits(max_bytes=1024 * 1024))
    received: asyncio.Queue[bytes] = asyncio.Queue()
    back = asyncio.Event()
    bus.on_reconnect(back.set)

    async def handler(delivery: Delivery) -> None:
        received.put_nowait(delivery.data)

    async def follow() -> None:
        async for message in bus.follow("TC_INPUTS"):
            received.put_nowait(message.data)

    await bus.subscribe("tc.tokens.gw", handler)
    following = asyncio.create_task(follow())
    await bus.append("tc.in.cell", b"before")
    first = await asyncio.wait_for(received.get(), 10)
    await bus._client._send_command(b"NONSENSE\r\n")
    await bus._client._flush_pending()
    await asyncio.wait_for(back.wait(), 20)
    await bus.append("tc.in.cell", b"stored")
    second = await asyncio.wait_for(received.get(), 20)
    await bus.publish("tc.tokens.gw", b"published")
    third = await asyncio.wait_for(received.get(), 20)
    following.cancel()
    await bus.close()

    assert (first, second, third) == (b"before", b"stored", b"published")


async def test_append_in_flight_fails_when_the_connection_is_lost(nats_server: NatsServer) -> None:
    """Nobody waits for the timeout of an acknowledgement that cannot come any more."""
    bus = await connect([nats_server.url], "test")
    await bus.ensure_streams(StreamLimits(max_bytes=1024 * 1024))
    lost = asyncio.Event()
    bus.on_disconnect(lost.set)

    nats_server.kill()
    with pytest.raises(Unavailable):
        # Whether the client knows of the loss already or not, both are Unavailable and soon.
        await asyncio.wait_for(bus.append("tc.in.cell", b"", timeout_s=600.0), 20.0)
    await asyncio.wait_for(lost.wait(), 20.0)
    nats_server.start()
    await bus.close()

    assert not bus.is_connected


async def test_a_hearer_that_raises_keeps_no_message_from_the_next(nats_server: NatsServer) -> None:
    """What is called where messages are read must not end the reading."""
    bus = NatsBus(from_urls([nats_server.url]), "test")
    await bus.open(10.0)
    heard: list[bytes] = []
    last = asyncio.Event()

    def hear(message: Any) -> None:
        heard.append(message.data)
        if message.data == b"last":
            last.set()
        raise ValueError(message.data)

    await bus._client.hear("tc.status", hear)
    for data in (b"first", b"last"):
        await bus.publish("tc.status", data)
    await asyncio.wait_for(last.wait(), 20)
    await bus.call("$SYS.REQ.USER.INFO", b"")  # The connection reads on.
    await bus.close()

    assert heard == [b"first", b"last"]


async def test_what_a_connection_has_no_room_for_stays_in_order(nats_server: NatsServer) -> None:
    """Large and small messages in one turn of the loop: some are written at once, others by nats-py's task."""
    bus = await connect([nats_server.url], "test")
    sizes = [number * 7_919 % 300_000 for number in range(200)]
    arrived: list[int] = []
    complete = asyncio.Event()

    async def note(delivery: Delivery) -> None:
        arrived.append(len(delivery.data))
        if len(arrived) == len(sizes):
            complete.set()

    await bus.subscribe("tc.status", note)
    for size in sizes:
        await bus.publish("tc.status", b"x" * size)
    await asyncio.wait_for(complete.wait(), 60)
    await bus.close()

    assert arrived == sizes


class FullTransport:
    """A connection with no room."""

    has_room = False


async def test_nothing_is_published_now_where_there_is_no_room() -> None:
    """It is for the caller to wait, and not for a buffer to grow."""
    client = Client(from_urls(["nats://127.0.0.1:1"]))
    client._flush_queue = asyncio.Queue()
    client._transport = cast(Transport, FullTransport())

    assert not client.publish_now("tc.status", b"data")
    assert client._pending == []


async def test_no_subject_and_no_header_is_read_as_another_command(nats_server: NatsServer) -> None:
    """Ids of other processes become parts of subjects and headers."""
    bus = await connect([nats_server.url], "test")
    arrived: asyncio.Queue[bytes] = asyncio.Queue()

    async def note(delivery: Delivery) -> None:
        arrived.put_nowait(delivery.data)

    await bus.subscribe("tc.status", note)
    with pytest.raises(Unavailable):
        await bus.publish("tc.tokens.a 0\r\n\r\nPUB tc.status", b"smuggled")
    with pytest.raises(Unavailable):
        bus.publish_now("tc.tokens.a 0\r\n\r\nPUB tc.status", b"smuggled")
    with pytest.raises(Unavailable):
        await bus.publish("tc.status", b"smuggled", {"tc-number": "1\r\nNats-Msg-Id: 2"})
    await bus.publish("tc.status", b"plain")
    first = await asyncio.wait_for(arrived.get(), 20)
    await bus.close()

    assert first == b"plain"
