"""Heartbeats go out while the event loop of their process is busy."""

from __future__ import annotations

import threading

import pytest

from shared.bus.beats import STUCK_S, Beats
from shared.bus.nats_bus import connect
from shared.bus.protocol import Delivery
from shared.errors import Unavailable
from tests.nats_server import NatsServer
from tests.waiting import until


class Noted:
    """A line that notes what is said, and lets another thread wait for it."""

    is_connected = True

    def __init__(self, failures: int = 0) -> None:
        self.said: list[tuple[str, bytes]] = []
        self.is_closed = False
        self.failures = failures
        self._more = threading.Condition()

    async def publish(self, subject: str, data: bytes) -> None:
        with self._more:
            self.said.append((subject, data))
            self._more.notify_all()
        if len(self.said) <= self.failures:
            raise Unavailable("away")

    async def close(self) -> None:
        self.is_closed = True

    def wait_for(self, count: int) -> None:
        """Block this thread until so many were said."""
        with self._more:
            assert self._more.wait_for(lambda: len(self.said) >= count, timeout=30)


@pytest.fixture
def line() -> Noted:
    return Noted(failures=2)


async def test_a_heartbeat_is_said_again_while_the_event_loop_is_blocked(line: Noted) -> None:
    """Even where the broker was away for some of them."""

    async def opened() -> Noted:
        return line

    beats = Beats(opened, repeat_s=0.001)
    beats.say("hb.gateway.one", b"first")
    line.wait_for(5)  # The loop of this test stands still.
    beats.close()

    assert set(line.said) == {("hb.gateway.one", b"first")}
    assert line.is_closed


async def test_the_newest_is_said_at_once(line: Noted) -> None:
    """Not when the next repetition is due."""

    async def opened() -> Noted:
        return line

    beats = Beats(opened, repeat_s=3600.0)
    for number in range(3):
        beats.say("hb", b"%d" % number)
        line.wait_for(number + 1)
    beats.close()

    assert [data for _, data in line.said] == [b"0", b"1", b"2"]


async def test_without_a_connection_the_process_says_it_itself() -> None:
    """Until the thread has one."""

    async def never() -> Noted:
        raise Unavailable("no server")

    beats = Beats(never)

    assert not beats.say("hb", b"x")
    beats.close()


async def test_a_process_that_is_stuck_is_left_to_count_as_dead(line: Noted) -> None:
    """What it said last is true no longer."""
    now_s = 0.0

    async def opened() -> Noted:
        return line

    beats = Beats(opened, repeat_s=3600.0, clock_s=lambda: now_s)
    nothing = beats.due()
    beats.say("hb", b"x")
    before = beats.due()
    now_s = STUCK_S
    after = beats.due()
    beats.close()

    assert (nothing, before, after) == (None, ("hb", b"x"), None)


async def test_a_bus_beats_over_a_connection_of_its_own(nats_server: NatsServer) -> None:
    """Which ends with it; the first goes over the bus itself, so that none is missed."""
    heard: list[bytes] = []
    bus, other = await connect([nats_server.url], "one"), await connect([nats_server.url], "other")

    async def hear(delivery: Delivery) -> None:
        heard.append(delivery.data)

    await other.subscribe("hb.>", hear)
    await bus.beat("hb.one", b"first")
    await until(lambda: "one heartbeats" in connections(nats_server))
    await bus.beat("hb.one", b"second")
    await until(lambda: heard[-1:] == [b"second"])
    await bus.close()
    await until(lambda: connections(nats_server) == {"other"})
    await other.close()

    assert heard[0] == b"first"


def connections(server: NatsServer) -> set[str]:
    """Names of those that the server has."""
    return {each.get("name", "") for each in server.monitor("connz")["connections"]}
