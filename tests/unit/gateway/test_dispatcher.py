"""Storing requests while the broker cannot take any: waited for within bounds, stored once, refused clearly."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from services.gateway.dispatcher import Dispatcher
from services.gateway.pending import Choice, Generation, PendingTable
from shared import subjects
from shared.bus.protocol import StreamLimits
from shared.errors import Unavailable
from tests.memory_bus import MemoryBroker, MemoryBus
from tests.scripted_cell import submit
from tests.virtual_loop import run_virtually


class LeaderlessBus(MemoryBus):
    """A client whose stream takes nothing before ``elected_s``, and from ``lost_s`` to ``back_s`` has no broker."""

    elected_s = 0.0
    lost_s = back_s = float("inf")

    @property
    def is_connected(self) -> bool:
        return not self.lost_s <= asyncio.get_running_loop().time() < self.back_s

    async def append(self, subject: str, data: bytes, *, message_id: str = "", timeout_s: float = 5.0) -> int:
        stored = await super().append(subject, data, message_id=message_id, timeout_s=timeout_s)
        # What is told to have failed may be stored all the same.
        if asyncio.get_running_loop().time() < self.elected_s:
            raise Unavailable("no stream captures this subject")
        return stored


def submitted_s(bus: LeaderlessBus, *, deadline_ms: int = 0, count: int = 1) -> float:
    """When so many choices of one request were stored. Raises what the client is told."""
    requests = [replace(submit(f"r{number}", [1]), deadline_ms=deadline_ms) for number in range(count)]
    pending = PendingTable()
    dispatcher = Dispatcher(bus, subjects.request_input("gw"), "gw", pending)

    async def start() -> float:
        try:
            await dispatcher.start(Generation([Choice(request, 0, 0, now_s=0.0) for request in requests]))
        except Unavailable:
            assert len(pending) == 0
            raise
        assert len(pending) == count
        return asyncio.get_running_loop().time()

    return run_virtually(start())


@pytest.fixture
def broker() -> MemoryBroker:
    made = MemoryBroker(clock=lambda: 1)
    made.ensure_streams(StreamLimits(max_bytes=2**20))
    return made


@pytest.fixture
def bus(broker: MemoryBroker) -> LeaderlessBus:
    return LeaderlessBus(broker, "gateway")


def stored(broker: MemoryBroker) -> int:
    return len(broker.stream(subjects.INPUTS_STREAM).messages)


@pytest.mark.parametrize("elected_s", [0.0, 0.5, 4.0, 9.0])
def test_a_request_waits_for_an_election_and_is_stored_once(
    bus: LeaderlessBus, broker: MemoryBroker, elected_s: float
) -> None:
    """Each of three choices goes on within a second of the moment at which a leader is there."""
    bus.elected_s = elected_s

    assert elected_s <= submitted_s(bus, count=3) <= elected_s + 1.0
    assert stored(broker) == 3


def test_a_request_that_cannot_be_stored_is_refused_in_the_end(bus: LeaderlessBus) -> None:
    """A client is told when to try again, and does not wait for ever."""
    bus.elected_s = 3600.0

    with pytest.raises(Unavailable) as refused:
        submitted_s(bus)

    assert refused.value.retry_after_ms > 0


def test_a_request_is_not_tried_beyond_its_deadline(bus: LeaderlessBus) -> None:
    """Nobody would wait for its answer any more."""
    bus.elected_s = 5.0

    assert submitted_s(bus, deadline_ms=8_000) < 6.0
    with pytest.raises(Unavailable):
        submitted_s(bus, deadline_ms=2_000)


def test_without_a_broker_a_client_learns_it_at_once(bus: LeaderlessBus) -> None:
    """Before the first try, and between two."""
    bus.elected_s, bus.lost_s, bus.back_s = 6.0, 2.0, 6.0

    with pytest.raises(Unavailable):
        submitted_s(bus)

    bus.lost_s = 0.0
    with pytest.raises(Unavailable, match="not connected"):
        submitted_s(bus)


async def test_a_request_of_one_choice_is_on_its_way_at_once(bus: LeaderlessBus, broker: MemoryBroker) -> None:
    """In the same turn of the loop in which it is begun."""
    dispatcher = Dispatcher(bus, subjects.request_input("gw"), "gw", PendingTable())
    starting = asyncio.create_task(dispatcher.start(Generation([Choice(submit("r", [1]), 0, 0, now_s=0.0)])))
    await asyncio.sleep(0)

    assert stored(broker) == 1
    await starting
