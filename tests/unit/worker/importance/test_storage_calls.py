"""When a slot is free again: the storage's answer, a later answer for the same memory, or the end of the storage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest

from services.worker.importance.storage_calls import PendingRead, StorageCalls
from shared import subjects
from shared.bus.protocol import Bus, Delivery
from shared.codec import encode
from shared.errors import PayloadTooLarge, SparsePrefixLost, Unavailable
from shared.messages.sparse_reads import ReadSparse, SparseRead
from shared.messages.status import CellStatus

CALL = ReadSparse(namespace="", depth=0, chunks=b"", layer=0, part="kv", buffer="b", offset=0, nbytes=8)
ANSWER = encode(SparseRead(checksum=5))


class ScriptedBus:
    """Calls end when the test says how."""

    max_payload = 2**20
    is_connected = True

    def __init__(self) -> None:
        self.calls: list[tuple[str, asyncio.Future[bytes]]] = []

    async def call(self, subject: str, data: bytes, *, timeout_s: float = 2.0) -> bytes:
        assert data == encode(CALL)
        self.calls.append((subject, asyncio.get_running_loop().create_future()))
        return await self.calls[-1][1]


class Asking:
    """One read of storage ``s``, begun on another thread as the compute thread does."""

    def __init__(self, **waits: float) -> None:
        self.bus = ScriptedBus()
        self.calls = StorageCalls(cast(Bus, self.bus), **waits)
        self.ended = 0
        self.pending: PendingRead

    def _end(self) -> None:
        self.ended += 1

    async def begin(self) -> None:
        self.pending = await asyncio.to_thread(self.calls.begin, "s", CALL, self._end)
        await settle(lambda: bool(self.bus.calls))

    async def see(self, incarnations: dict[str, str]) -> None:
        status: Any = CellStatus(
            scheduler_id="c", epoch=1, seq=1, model="m", page_size=16, queued=0, running=0, max_queued=1,
            max_context=1, storages=tuple(incarnations), storage_incarnations=incarnations,
        )  # fmt: skip
        await self.calls.see(Delivery(subjects.STATUS, encode(status), {}))

    async def fails(self, match: str) -> None:
        with pytest.raises(SparsePrefixLost, match=match):
            await asyncio.to_thread(self.pending.wait, 20)


async def settle(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


async def turns() -> None:
    """More turns of the loop than anything here takes."""
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.parametrize("reader_first", [False, True])
async def test_a_slot_is_free_when_both_sides_are_done(reader_first: bool) -> None:
    """Whoever is last, and once."""
    asking = Asking()
    await asking.begin()
    if reader_first:
        asking.pending.leave()
    else:
        asking.bus.calls[0][1].set_result(ANSWER)
        assert (await asyncio.to_thread(asking.pending.wait, 20)).checksum == 5
        await turns()
    before = asking.ended
    if reader_first:
        asking.bus.calls[0][1].set_result(ANSWER)
        await settle(lambda: asking.ended > 0)
    else:
        asking.pending.leave()

    assert (before, asking.ended) == (0, 1)
    assert asking.bus.calls[0][0] == subjects.rpc("storage", "sparse", "s")


@pytest.mark.parametrize(
    "said",
    [ANSWER, encode(SparseRead(error="torn", code="integrity_error")), b"no answer", PayloadTooLarge("too long")],
    ids=["answer", "error", "garbage", "refusal"],
)
async def test_a_slot_is_free_once_the_reader_that_has_an_answer_is_done(said: bytes | Exception) -> None:
    """The storage is done with it by then, so that the next read need not wait for another turn of the loop."""
    asking, ended = Asking(), list[int]()
    await asking.begin()

    def read(_: object) -> None:
        asking.pending.leave()
        ended.append(asking.ended)

    asking.pending._answer.add_done_callback(read)
    _, called = asking.bus.calls[0]
    if isinstance(said, bytes):
        called.set_result(said)
    else:
        called.set_exception(said)
    await settle(lambda: bool(ended))

    assert ended == [1]


async def test_a_lost_answer_is_asked_for_again() -> None:
    """The reader hears of it at once; the slot is kept until a call for the same memory was answered."""
    asking = Asking(ask_again_s=0.0)
    await asking.begin()
    asking.bus.calls[0][1].set_exception(Unavailable("no answer in time"))
    await asking.fails("no answer in time")
    asking.pending.leave()

    await settle(lambda: len(asking.bus.calls) == 2)
    before = asking.ended
    asking.bus.calls[1][1].set_result(encode(SparseRead(error="torn", code="integrity_error")))
    await settle(lambda: asking.ended == 1)

    assert before == 0
    assert len(asking.bus.calls) == 2


def _has_ended_once(asking: Asking) -> bool:
    return asking.ended == 1


async def test_a_storage_that_is_gone_writes_no_more() -> None:
    """When the cell lists another incarnation, or none, the slot is free; while it lists the same one, it is not."""
    for after in ({"s": "second"}, {}):
        asking = Asking(ask_again_s=1000.0)
        await asking.see({"s": "first"})
        await asking.begin()
        asking.bus.calls[0][1].set_exception(Unavailable("no answer in time"))
        await asking.fails("does not answer")
        asking.pending.leave()
        await turns()
        held = asking.ended

        await asking.see(after)
        await settle(partial(_has_ended_once, asking))

        assert held == 0
        assert len(asking.bus.calls) == 1


async def test_a_reader_does_not_wait_for_a_storage_that_is_gone() -> None:
    """It hears so from the cell; the slot waits for the call's own end."""
    asking = Asking()
    await asking.see({"s": "first"})
    await asking.begin()

    await asking.see({"s": "second"})
    await asking.fails("is gone")
    asking.pending.leave()

    assert asking.ended == 0
    await asking.calls.close()


async def test_what_was_never_sent_holds_nothing() -> None:
    """A call that is too large, or a bus that is not connected, or a worker that stops."""
    asking = Asking()
    await asking.begin()
    asking.bus.calls[0][1].set_exception(PayloadTooLarge("too large"))
    await asking.fails("too large")
    asking.pending.leave()
    await settle(lambda: asking.ended == 1)

    asking.bus.is_connected = False
    with pytest.raises(SparsePrefixLost, match="not connected"):
        await asking.begin()
    asking.bus.is_connected = True
    await asking.calls.close()
    with pytest.raises(SparsePrefixLost):
        await asking.begin()
    assert asking.ended == 1


async def test_closing_fails_what_is_under_way() -> None:
    """A thread that waits goes on; its slot is not given to anybody."""
    asking = Asking()
    await asking.begin()

    await asking.calls.close()
    await asking.fails("stopping")
    asking.pending.leave()

    assert asking.ended == 0


async def test_an_answer_that_is_none_is_an_error() -> None:
    """And the end of the call."""
    asking = Asking()
    await asking.begin()
    asking.bus.calls[0][1].set_result(b"\xc1")

    await asking.fails("SparseRead")
    asking.pending.leave()
    await settle(lambda: asking.ended == 1)
