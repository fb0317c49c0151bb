"""A storage asks whether it is still a member, after it has read and before it keeps."""

from __future__ import annotations

import asyncio

import pytest

from services.storage.standing import PATIENCE_S, StandingCheck
from shared import subjects
from shared.codec import decode, encode
from shared.errors import TransportError, Unavailable
from shared.messages.status import GetStanding, Standing
from tests.memory_bus import MemoryBroker
from tests.virtual_loop import run_virtually


class Cell:
    """A scheduler that answers when it is let, and a clock that moves with every look."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.asked: list[GetStanding] = []
        self.is_member = True
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._now_ns = 0
        self.check = StandingCheck(self.broker.connect("storage"), "s0", "one", clock_ns=self._tick)

    def _tick(self) -> int:
        self._now_ns += 1
        return self._now_ns

    async def serve(self) -> None:
        async def answer(data: bytes) -> bytes:
            self.asked.append(decode(data, GetStanding))
            await self.may_answer.wait()
            return encode(Standing(is_member=self.is_member))

        await self.broker.connect("scheduler").serve(subjects.rpc("scheduler", "standing"), answer)


@pytest.fixture
async def cell() -> Cell:
    cell = Cell()
    await cell.serve()
    return cell


async def test_a_member_goes_on_and_one_given_up_does_not(cell: Cell) -> None:
    """The question names this incarnation; a "no" raises."""
    await cell.check.confirm()
    cell.is_member = False

    with pytest.raises(TransportError, match="given this storage up"):
        await cell.check.confirm()
    assert cell.asked == [GetStanding(storage_id="s0", incarnation="one")] * 2


async def test_an_answer_serves_only_those_who_had_read_before_it_was_asked_for(cell: Cell) -> None:
    """While one question is under way, those who come have to ask anew, but once for all of them."""
    cell.may_answer.clear()
    first = asyncio.create_task(cell.check.confirm())
    while not cell.asked:
        await asyncio.sleep(0)
    later = [asyncio.create_task(cell.check.confirm()) for _ in range(5)]
    await asyncio.sleep(0)
    cell.may_answer.set()
    await asyncio.gather(first, *later)

    assert len(cell.asked) == 2


def test_silence_is_no_yes() -> None:
    """Without a scheduler nothing is kept."""

    async def silent() -> float:
        with pytest.raises(Unavailable):
            await Cell().check.confirm()
        return asyncio.get_running_loop().time()

    assert PATIENCE_S <= run_virtually(silent()) < 2 * PATIENCE_S


def test_what_was_read_during_a_take_over_is_kept() -> None:
    """No scheduler answers for some seconds; the one that leads then says that the storage is a member."""

    async def taken_over() -> list[GetStanding]:
        cell = Cell()
        reading = asyncio.create_task(cell.check.confirm())
        await asyncio.sleep(PATIENCE_S / 2)
        await cell.serve()
        await reading
        return cell.asked

    assert run_virtually(taken_over()) == [GetStanding(storage_id="s0", incarnation="one")]
