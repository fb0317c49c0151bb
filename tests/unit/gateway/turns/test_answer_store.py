"""Answers in the cell's bucket: sealed for those who know the conversation, and never worth a wait."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from services.gateway.turns.answer_store import REST_FIRST_S, AnswerStore
from services.gateway.turns.places import Place, places
from services.gateway.turns.sealing import seal, unseal
from shared.errors import Unavailable
from shared.messages.base import pack_int32
from tests.memory_bus import MemoryBroker, MemoryBus

PLACE, OTHER = places("<u>hi<a>", "<a>", "n", 0)[0], places("<u>ho<a>", "<a>", "n", 0)[0]
ANSWERS = [pack_int32([5, 6, 7]), pack_int32([8])]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_an_entry_opens_for_its_place_alone() -> None:
    """Another conversation's key, another name and a changed bit do not open it, and neither does rubbish."""
    sealed = seal(PLACE, ANSWERS)

    assert unseal(PLACE, sealed) == ANSWERS
    assert unseal(OTHER, sealed) is None
    assert unseal(Place(0, OTHER.name, PLACE.key), sealed) is None
    assert unseal(PLACE, sealed[:-1] + bytes([sealed[-1] ^ 1])) is None
    assert unseal(PLACE, b"") is unseal(PLACE, b"x" * 40) is None
    assert unseal(PLACE, seal(PLACE, [b"abc"])) is None
    assert ANSWERS[0] not in sealed


async def test_what_one_gateway_writes_another_reads() -> None:
    """A place of which nothing is stored has no answers; an unreadable entry counts as none."""
    broker = MemoryBroker()
    one, other = (AnswerStore(broker.connect(name), 1.0, Clock()) for name in ("one", "other"))
    await one.write(PLACE, ANSWERS)
    broker.answers[OTHER.name] = b"rubbish"

    assert await other.read([PLACE, OTHER]) == {PLACE.name: ANSWERS, OTHER.name: []}
    assert await other.read([]) == {}


async def test_a_store_that_fails_is_left_alone_for_a_while() -> None:
    """Its fault is told until it works again."""
    clock, bus = Clock(), MemoryBroker().connect("one")
    store = AnswerStore(bus, 1.0, clock)
    bus.disconnect()

    assert await store.read([PLACE]) == {}
    assert (store.is_open, bool(store.fault)) == (False, True)
    await store.write(PLACE, ANSWERS)
    bus.reconnect()
    clock.now_s = 2 * REST_FIRST_S
    assert store.is_open
    assert await store.read([PLACE]) == {PLACE.name: []}
    assert store.fault == ""


async def test_a_lookup_ends_in_time() -> None:
    """Also where the bus does not answer at all."""

    class Silent(MemoryBus):
        async def read_answers(self, names: Sequence[str], *, timeout_s: float) -> dict[str, bytes | None]:
            await asyncio.Event().wait()
            raise Unavailable("never")

    store = AnswerStore(Silent(MemoryBroker(), "one"), 0.01, asyncio.get_running_loop().time)

    async with asyncio.timeout(10):
        assert await store.read([PLACE]) == {}
    assert "0.01 s" in store.fault


async def test_an_entry_too_large_for_the_broker_is_no_fault() -> None:
    """It is not stored, and others are."""
    store = AnswerStore(MemoryBroker(max_payload=100).connect("one"), 1.0, Clock())

    await store.write(PLACE, [bytes(400)])
    await store.write(OTHER, [bytes(40)])

    assert store.fault == ""
    assert await store.read([PLACE, OTHER]) == {PLACE.name: [], OTHER.name: [bytes(40)]}
