"""Calls for parts of a prefix's KV: into the memory that was lent, an answer for each, and never a byte after it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
import xxhash

from services.storage.sparse_calls import ANSWER_BYTES_MOST, SparseCalls
from shared import subjects
from shared.codec import decode, encode
from shared.errors import IntegrityError, NotFound, ThermoclineError
from shared.memory import SharedSegment
from shared.messages.sparse_reads import BUFFER_KIND, ReadSparse, SparseRead
from tests.memory_bus import MemoryBroker


class GatedReader:
    """Fills what it is given with the call's layer number, when its gate opens. ``began`` has layers in order."""

    def __init__(self) -> None:
        self.began: list[int] = []
        self.gates: dict[int, asyncio.Event] = {}
        self.error: Exception | None = None

    def gate(self, layer: int) -> asyncio.Event:
        return self.gates.setdefault(layer, asyncio.Event())

    async def read(self, call: ReadSparse, into: memoryview) -> int:
        self.began.append(call.layer)
        if call.layer in self.gates:
            await self.gates[call.layer].wait()
        if self.error is not None:
            raise self.error
        into[:] = bytes([call.layer]) * len(into)
        return 3 * len(into)


@pytest.fixture
def buffer(shm_prefix: str) -> Iterator[SharedSegment]:
    segment = SharedSegment.create(shm_prefix, BUFFER_KIND, 4096)
    yield segment
    segment.close()


@pytest.fixture
def reader() -> GatedReader:
    return GatedReader()


@pytest.fixture
async def calls(reader: GatedReader, shm_prefix: str) -> SparseCalls:
    return SparseCalls(lambda: reader, shm_prefix, at_once=2, waiting_most=2)


def question(buffer: str, layer: int, offset: int = 0, nbytes: int = 64) -> bytes:
    return encode(
        ReadSparse(
            namespace="0" * 32,
            depth=0,
            chunks=bytes(16),
            layer=layer,
            part="keys",
            buffer=buffer,
            offset=offset,
            nbytes=nbytes,
        )
    )


async def ask(calls: SparseCalls, data: bytes) -> SparseRead:
    return decode(await calls.answer(data), SparseRead)


async def settle(condition: Callable[[], bool]) -> None:
    """Let the loop run until ``condition`` is true."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


async def test_what_was_read_is_where_it_was_to_be(
    broker: MemoryBroker, calls: SparseCalls, buffer: SharedSegment
) -> None:
    """Over the bus: the bytes at the offset and no others, their checksum, and what the disk gave for them."""
    storage, worker = broker.connect("storage"), broker.connect("worker")
    await storage.serve(subjects.rpc("storage", "sparse", "s"), calls.answer)

    data = await worker.call(subjects.rpc("storage", "sparse", "s"), question(buffer.name, 7, offset=128))
    answer = decode(data, SparseRead)

    assert (answer.error, answer.disk_bytes) == ("", 192)
    assert answer.checksum == xxhash.xxh3_64_intdigest(bytes([7]) * 64)
    assert buffer.array.tobytes() == bytes(128) + bytes([7]) * 64 + bytes(4096 - 192)
    calls.close()


@pytest.mark.parametrize(("offset", "nbytes"), [(4096, 1), (-64, 64), (4033, 64), (0, 0), (0, ANSWER_BYTES_MOST + 1)])
async def test_memory_outside_of_the_buffer_is_refused(
    calls: SparseCalls, reader: GatedReader, buffer: SharedSegment, offset: int, nbytes: int
) -> None:
    """Nothing is read for it, and nothing written; nor is there for more bytes than one call may have."""
    answer = await ask(calls, question(buffer.name, 1, offset, nbytes))

    assert answer.code == "invalid_request"
    assert reader.began == []
    assert not buffer.array.any()


async def test_only_lent_segments_of_the_cell_are_written_to(calls: SparseCalls, shm_prefix: str) -> None:
    """Not a pool, not another cell's, not a file elsewhere, and not one that is not there."""
    pool = SharedSegment.create(shm_prefix, "device", 4096)
    foreign = SharedSegment.create(f"{shm_prefix}-b", BUFFER_KIND, 4096)
    gone = f"{shm_prefix}.1-1.{BUFFER_KIND}.00000000"
    try:
        codes = [
            (await ask(calls, question(name, 1))).code for name in (pool.name, foreign.name, "../../etc/passwd", gone)
        ]
    finally:
        foreign.unlink()

    assert codes == ["invalid_request", "invalid_request", "invalid_request", "transport_error"]
    assert not pool.array.any()
    assert not foreign.array.any()


async def test_bytes_that_are_no_call_are_answered(calls: SparseCalls) -> None:
    """With an error, like all the rest."""
    assert (await ask(calls, b"\xc1")).code == "codec_error"


@pytest.mark.parametrize("error", [NotFound("not there"), IntegrityError("torn"), ValueError("a bug")])
async def test_an_error_of_reading_is_the_answer(
    calls: SparseCalls, reader: GatedReader, buffer: SharedSegment, error: Exception
) -> None:
    """With its code; of a bug only its kind is told."""
    reader.error = error

    answer = await ask(calls, question(buffer.name, 1))

    known = isinstance(error, ThermoclineError)
    assert answer.code == (error.code if isinstance(error, ThermoclineError) else "internal_error")
    assert answer.error == (str(error) if known else "reading failed with ValueError")
    assert not buffer.array.any()


async def test_without_a_disk_nothing_is_read(shm_prefix: str, buffer: SharedSegment) -> None:
    """A worker hears so at once."""
    calls = SparseCalls(lambda: None, shm_prefix)

    assert (await ask(calls, question(buffer.name, 1))).code == "service_unavailable"


async def test_calls_wait_for_their_turn_in_order(
    calls: SparseCalls, reader: GatedReader, buffer: SharedSegment
) -> None:
    """Two read at a time, two wait, the fifth is refused."""
    for layer in range(4):
        reader.gate(layer)
    tasks = [asyncio.create_task(ask(calls, question(buffer.name, layer, 64 * layer))) for layer in range(4)]
    await settle(lambda: len(reader.began) == 2)

    refused = await ask(calls, question(buffer.name, 4, 256))
    began = list(reader.began)
    reader.gate(1).set()
    await settle(lambda: len(reader.began) == 3)
    for layer in range(4):
        reader.gate(layer).set()
    answers = await asyncio.gather(*tasks)

    assert refused.code == "queue_full"
    assert began == [0, 1]
    assert reader.began == [0, 1, 2, 3]
    assert [answer.error for answer in answers] == [""] * 4


async def test_calls_for_the_same_memory_run_one_after_another(
    calls: SparseCalls, reader: GatedReader, buffer: SharedSegment
) -> None:
    """So that the later one's answer says that the earlier one has ended, too; a neighbour does not wait."""
    reader.gate(1)
    first = asyncio.create_task(ask(calls, question(buffer.name, 1, 64)))
    again = asyncio.create_task(ask(calls, question(buffer.name, 2, 100)))
    await settle(lambda: reader.began == [1])
    neighbour = await ask(calls, question(buffer.name, 3, 0))
    began = list(reader.began)
    reader.gate(1).set()
    await asyncio.gather(first, again)

    assert neighbour.error == ""
    assert began == [1, 3]
    assert reader.began == [1, 3, 2]
    assert buffer.array[64:164].tolist() == [1] * 36 + [2] * 64


async def test_a_refusal_too_says_that_earlier_calls_have_ended(
    calls: SparseCalls, reader: GatedReader, buffer: SharedSegment
) -> None:
    """There is no room for who asks again, and its memory is still being written to: it hears nothing until then."""
    for layer in range(4):
        reader.gate(layer)
    tasks = [asyncio.create_task(ask(calls, question(buffer.name, layer, 64 * layer))) for layer in range(4)]
    await settle(lambda: len(reader.began) == 2)

    again = asyncio.create_task(ask(calls, question(buffer.name, 0, 0)))
    elsewhere = await ask(calls, question(buffer.name, 0, 1024))
    silent = not again.done()
    for layer in range(4):
        reader.gate(layer).set()
    refused = await again
    await asyncio.gather(*tasks)

    assert (elsewhere.code, silent, refused.code) == ("queue_full", True, "queue_full")
    assert len(reader.began) == 4


async def test_nothing_is_written_after_a_cancelled_call(
    calls: SparseCalls, reader: GatedReader, buffer: SharedSegment
) -> None:
    """Its turn and its memory are the next one's."""
    reader.gate(1)
    cut_off = asyncio.create_task(calls.answer(question(buffer.name, 1)))
    await settle(lambda: reader.began == [1])

    cut_off.cancel()
    await asyncio.gather(cut_off, return_exceptions=True)
    reader.gate(1).set()
    answer = await ask(calls, question(buffer.name, 2))

    assert cut_off.cancelled()
    assert answer.error == ""
    assert set(buffer.array[:64].tolist()) == {2}
