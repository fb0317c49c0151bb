"""Calls of storages are carried out once, however often they are asked, and only by the worker that is meant."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest

from services.worker.store_calls import ANSWERS_KEPT, CALLS_MOST, StoreCalls
from shared.codec import decode, encode
from shared.messages.base import pack_int32
from shared.messages.page_stores import PagesStored, StorePages

CALL = StorePages(
    worker_incarnation="i", storage_id="s", storage_incarnation="si", pool="p", transfer_id=1,
    device_pages=pack_int32([1]), host_pages=pack_int32([2]),
)  # fmt: skip


class Stores:
    """What was begun, for the test to end. ``is_closed`` takes no more."""

    def __init__(self) -> None:
        self.begun: list[tuple[StorePages, Future[PagesStored]]] = []
        self.is_closed = False

    def begin(self, _: Any, call: StorePages) -> Future[PagesStored]:
        if self.is_closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        self.begun.append((call, Future()))
        return self.begun[-1][1]

    async def until(self, count: int) -> None:
        while len(self.begun) < count:
            await asyncio.sleep(0)


@pytest.fixture
def stores() -> Stores:
    return Stores()


@pytest.fixture
async def calls(stores: Stores) -> StoreCalls:
    unused: Any = None
    given: Any = stores
    return StoreCalls("i", unused, given)


async def ask(calls: StoreCalls, **changes: Any) -> PagesStored:
    return decode(await calls.answer(encode(msgspec.structs.replace(CALL, **changes))), PagesStored)


async def test_a_call_that_is_asked_again_is_carried_out_once(calls: StoreCalls, stores: Stores) -> None:
    """While it runs and after it has ended; its parts, and other transfers, are calls of their own."""
    asked = [asyncio.create_task(ask(calls)) for _ in range(2)]
    await stores.until(1)
    asked[0].cancel()
    stores.begun[0][1].set_result(PagesStored(seconds=2.0))

    assert await asked[1] == PagesStored(seconds=2.0)
    assert await ask(calls) == PagesStored(seconds=2.0)
    assert len(stores.begun) == 1
    others = [asyncio.create_task(ask(calls, part=1)), asyncio.create_task(ask(calls, storage_incarnation="other"))]
    await stores.until(3)
    for _, future in stores.begun[1:]:
        future.set_result(PagesStored())
    assert [await each for each in others] == [PagesStored()] * 2


async def test_a_call_for_another_incarnation_is_refused(calls: StoreCalls, stores: Stores) -> None:
    """Its device pages are not ours."""
    answer = await ask(calls, worker_incarnation="before")

    assert "incarnation i" in answer.refused
    assert stores.begun == []


async def test_calls_and_answers_are_bounded(calls: StoreCalls, stores: Stores) -> None:
    """One too many is refused; the answers that were given longest ago are forgotten first."""
    running = [asyncio.create_task(ask(calls, transfer_id=number)) for number in range(CALLS_MOST)]
    await stores.until(CALLS_MOST)
    assert "already" in (await ask(calls, transfer_id=CALLS_MOST)).refused
    for _, future in stores.begun:
        future.set_result(PagesStored())
    await asyncio.gather(*running)

    for number in range(1000, 1000 + ANSWERS_KEPT):
        one_more = asyncio.create_task(ask(calls, transfer_id=number))
        await stores.until(len(stores.begun) + 1 if not one_more.done() else 0)
        stores.begun[-1][1].set_result(PagesStored())
        await one_more

    assert len(calls._calls) <= ANSWERS_KEPT + 1
    assert ("s", "si", 1000 + ANSWERS_KEPT - 1, 0) in calls._calls
    assert ("s", "si", 0, 0) not in calls._calls


async def test_a_worker_that_stops_refuses(calls: StoreCalls, stores: Stores) -> None:
    """Nothing of the call was begun."""
    stores.is_closed = True

    assert "stopping" in (await ask(calls)).refused
