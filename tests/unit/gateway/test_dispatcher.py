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


def test_requests_are_refused_at_once_while_the_broker_stores_nothing(bus: LeaderlessBus) -> None:
    """One at a time finds out whether it does again, such as after room was made on its disk."""
    bus.elected_s = 20.0
    dispatcher = Dispatcher(bus, subjects.request_input("gw"), "gw", PendingTable())
    ends: list[tuple[str, bool, float]] = []
    said: list[str] = []

    async def ask(name: str) -> None:
        begun_s, is_stored = asyncio.get_running_loop().time(), True
        try:
            await dispatcher.start(Generation([Choice(submit(name, [1]), 0, 0, now_s=0.0)]))
        except Unavailable as error:
            is_stored = False
            said.append(error.message)
        ends.append((name, is_stored, asyncio.get_running_loop().time() - begun_s))

    async def run() -> None:
        await asyncio.gather(ask("first"), ask("beside it"))
        await asyncio.gather(ask("trying"), ask("refused"), ask("refused too"))
        await asyncio.gather(ask("later"), ask("later too"))

    run_virtually(run())

    waited = {name: seconds for name, _, seconds in ends}
    assert [name for name, is_stored, _ in ends if is_stored] == ["trying", "later", "later too"]
    assert all("does not store the request" in each for each in said)
    assert min(waited["first"], waited["beside it"]) > 10.0
    assert 5.0 < waited["trying"] < 10.0
    assert [waited[name] for name in ("refused", "refused too", "later", "later too")] == [0.0] * 4


@pytest.mark.parametrize("deadline_ms", [2_000, 11_000])
def test_a_short_deadline_says_nothing_of_the_broker(bus: LeaderlessBus, deadline_ms: int) -> None:
    """Requests after it have the whole time of an election."""
    bus.elected_s = 15.0
    dispatcher = Dispatcher(bus, subjects.request_input("gw"), "gw", PendingTable())

    async def ask(name: str, deadline_ms: int) -> bool:
        request = replace(submit(name, [1]), deadline_ms=deadline_ms)
        try:
            await dispatcher.start(Generation([Choice(request, 0, 0, now_s=0.0)]))
        except Unavailable:
            return False
        return True

    async def run() -> list[bool]:
        is_stored = [await ask("short", deadline_ms)]
        await asyncio.sleep(10.0 - asyncio.get_running_loop().time() if deadline_ms < 10_000 else 0.0)
        return [*is_stored, *await asyncio.gather(ask("one", 0), ask("another", 0))]

    are_stored: list[bool] = run_virtually(run())

    assert are_stored == [False, True, True]
