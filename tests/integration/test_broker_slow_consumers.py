"""Consumers that are slower than what comes: the broker cuts them off, or they drop; nothing that counts is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from shared import subjects
from shared.broker import BrokerSettings
from shared.bus import measures
from shared.bus.nats_bus import connect, connect_with
from shared.bus.protocol import Delivery, StreamLimits
from tests.nats_server import NatsServer
from tests.waiting import until

pytestmark = pytest.mark.integration

LIMITS = StreamLimits(max_bytes=256 * 2**20)
BODY = b"x" * 100_000
MESSAGES = 200


@pytest.fixture
def strict_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server that cuts off whoever lets two megabytes pile up."""
    with NatsServer(tmp_path, config='max_pending: 2MB\nwrite_deadline: "2s"') as server:
        yield server


class Stalled:
    """A client in a thread of its own, whose event loop stands still until it is released.

    It follows TC_INPUTS and subscribes to tokens; nothing of what the broker sends is read meanwhile.
    """

    def __init__(self, url: str) -> None:
        self.seen: list[int] = []
        self.tokens = 0
        self.reconnections = 0
        self.is_ready = threading.Event()
        self.stall = threading.Event()
        self.release = threading.Event()
        self.enough = threading.Event()
        self._url = url
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self.release.set()
        self.enough.set()
        self._thread.join(30)

    async def _run(self) -> None:
        bus = await connect([self._url], "stalled")

        def back() -> None:
            self.reconnections += 1

        bus.on_reconnect(back)
        await bus.subscribe("tc.tokens.gw", self._token)
        following = asyncio.create_task(self._follow(bus))
        self.is_ready.set()
        while not self.enough.is_set():
            await asyncio.sleep(0.01)
        following.cancel()
        await bus.close()

    async def _token(self, delivery: Delivery) -> None:
        self.tokens += 1
        if self.stall.is_set():
            self.release.wait(60)  # On purpose it blocks the whole loop, as a long computation would.

    async def _follow(self, bus: Any) -> None:
        async for message in bus.follow(subjects.INPUTS_STREAM):
            self.seen.append(message.seq)


async def test_who_is_cut_off_by_the_broker_misses_nothing_of_a_stream(strict_server: NatsServer) -> None:
    """The broker ends the connection of a client that does not read; once back, it follows without a gap."""
    bus = await connect([strict_server.url], "publisher")
    await bus.ensure_streams(LIMITS)
    slow = Stalled(strict_server.url)
    slow.start()
    try:
        await asyncio.to_thread(slow.is_ready.wait, 30)
        slow.stall.set()
        for _ in range(MESSAGES):
            await bus.publish("tc.tokens.gw", BODY)
            await bus.append("tc.in.cell", BODY)
        await bus.flush()
        cut_off = (await asyncio.to_thread(strict_server.monitor, "varz"))["slow_consumers"]
        slow.stall.clear()
        slow.release.set()
        await until(lambda: len(slow.seen) >= MESSAGES, timeout_s=60.0)
        await bus.publish("tc.tokens.gw", b"after")
        heard = slow.tokens
        await until(lambda: slow.tokens > heard)
    finally:
        slow.join()
        await bus.close()

    assert cut_off >= 1
    assert slow.reconnections >= 1
    assert slow.seen == list(range(1, MESSAGES + 1))
    assert heard < MESSAGES  # Core messages of that time are lost; those who need them ask for them again.


async def test_who_drops_messages_is_told_to_catch_up(nats_server: NatsServer) -> None:
    """Beyond its pending bytes a subscription drops, counts, says so, and lets everybody look for what was lost."""
    settings = BrokerSettings(nats=(nats_server.url,), nats_pending_bytes=2**20)
    bus = await connect_with(settings, "slow")
    other = await connect([nats_server.url], "publisher")
    released, caught_up = asyncio.Event(), asyncio.Event()
    handled = 0

    async def handler(delivery: Delivery) -> None:
        nonlocal handled
        await released.wait()
        handled += 1

    subscription = await bus.subscribe("tc.tokens.gw", handler)
    bus.on_reconnect(caught_up.set)
    before = measures.DROPPED._value.get()
    with capture_logs() as logged:
        for _ in range(30):
            await other.publish("tc.tokens.gw", BODY)
        await other.flush()
        await until(lambda: subscription.dropped > 0)
        await bus.flush()
        was_told = caught_up.is_set()
        released.set()
        await asyncio.wait_for(caught_up.wait(), 20)
    await until(lambda: handled + subscription.dropped == 30)
    await other.close()
    await bus.close()

    assert not was_told  # Not before the others were handled: what is lost meanwhile would have to be looked for again.
    assert 10 <= handled <= 12
    assert measures.DROPPED._value.get() - before == subscription.dropped == 30 - handled
    assert {"messages_dropped", "messages_caught_up"} <= {entry["event"] for entry in logged}
