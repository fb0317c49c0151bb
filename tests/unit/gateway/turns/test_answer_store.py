"""Answers in the cell's bucket: sealed for those who know the conversation, and never worth a wait."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from services.gateway.turns.answer_store import REST_FIRST_S, AnswerStore
from services.gateway.turns.places import Entry, entry, places
from services.gateway.turns.sealing import seal, unseal
from shared.errors import Unavailable
from shared.messages.base import pack_int32
from tests.memory_bus import MemoryBroker, MemoryBus

ENTRY, OTHER = (entry(places(f"<u>{text}<a>", "<a>", "n", 0)[0], "yes<e>", "<e>") for text in ("hi", "ho"))
ANSWER = pack_int32([5, 6, 7])


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_an_entry_opens_for_its_place_and_text_alone() -> None:
    """Another conversation's key, another answer's name and a changed bit do not open it, and neither does rubbish."""
    sealed = seal(ENTRY, ANSWER)

    assert unseal(ENTRY, sealed) == ANSWER
    assert unseal(OTHER, sealed) is None
    assert unseal(Entry(ENTRY.place, OTHER.name), sealed) is None
    assert unseal(Entry(OTHER.place, ENTRY.name), sealed) is None
    assert unseal(ENTRY, sealed[:-1] + bytes([sealed[-1] ^ 1])) is None
    assert unseal(ENTRY, b"") is unseal(ENTRY, b"x" * 40) is None
    assert unseal(ENTRY, seal(ENTRY, b"abc")) is None
    assert ANSWER not in sealed


def test_an_entry_is_named_for_its_place_and_text() -> None:
    """Neither space around the text, which clients and templates trim, nor what stands behind it counts."""
    named = {entry(ENTRY.place, text, "<e>").name for text in ("yes", " yes\n", "yes<e>", "yes <e><u>and")}

    assert named == {ENTRY.name}
    assert len({ENTRY.name, OTHER.name, entry(ENTRY.place, "no", "<e>").name, ENTRY.place.name}) == 4


async def test_what_one_gateway_writes_another_reads() -> None:
    """What is not stored is none, and so is what cannot be read."""
    broker = MemoryBroker()
    one, other = (AnswerStore(broker.connect(name), 1.0, Clock()) for name in ("one", "other"))
    await one.write(ENTRY, ANSWER)
    broker.answers[OTHER.name] = b"rubbish"

    assert await other.read([ENTRY, OTHER]) == {ENTRY.name: ANSWER, OTHER.name: None}
    assert await other.read([]) == {}


async def test_a_store_that_fails_is_left_alone_for_a_while() -> None:
    """Its fault is told until it works again."""
    clock, bus = Clock(), MemoryBroker().connect("one")
    store = AnswerStore(bus, 1.0, clock)
    bus.disconnect()

    assert await store.read([ENTRY]) == {}
    assert (store.is_open, bool(store.fault)) == (False, True)
    await store.write(ENTRY, ANSWER)
    bus.reconnect()
    clock.now_s = 2 * REST_FIRST_S
    assert store.is_open
    assert await store.read([ENTRY]) == {ENTRY.name: None}
    assert store.fault == ""


async def test_a_lookup_ends_in_time() -> None:
    """Also where the bus does not answer at all."""

    class Silent(MemoryBus):
        async def read_answers(self, names: Sequence[str], *, timeout_s: float) -> dict[str, bytes | None]:
            await asyncio.Event().wait()
            raise Unavailable("never")

    store = AnswerStore(Silent(MemoryBroker(), "one"), 0.01, asyncio.get_running_loop().time)

    async with asyncio.timeout(10):
        assert await store.read([ENTRY]) == {}
    assert "0.01 s" in store.fault


async def test_an_entry_too_large_for_the_broker_is_no_fault() -> None:
    """It is not stored, and others are."""
    store = AnswerStore(MemoryBroker(max_payload=100).connect("one"), 1.0, Clock())

    await store.write(ENTRY, bytes(400))
    await store.write(OTHER, bytes(40))

    assert store.fault == ""
    assert await store.read([ENTRY, OTHER]) == {ENTRY.name: None, OTHER.name: bytes(40)}
