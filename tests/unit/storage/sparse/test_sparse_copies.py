"""Copies on their way to the disk: behind their chunks, within their memory, and told of when they are there."""

from __future__ import annotations

import asyncio
import threading

import pytest

from services.storage.backends import ChunkKey
from services.storage.sparse.copies import SparseCopies
from services.storage.sparse.verification import verify_copy
from shared.errors import CapacityError, KeyMissing
from shared.ids import key_digest
from tests.chunk_makers import MadeChunk, aligned
from tests.memory_backend import MemoryBackend
from tests.unit.storage.sparse.made_copies import CIPHER, LAYOUT, Reading, copy_key, copy_of, copying, reading

ALICE = key_digest("alice")
BLOB = LAYOUT.blob_bytes(is_sealed=True)


class _Gated(MemoryBackend):
    """Puts wait for a gate, and fail as told."""

    def __init__(self) -> None:
        super().__init__(max_bytes=2**28)
        self.gate, self.entered = threading.Event(), threading.Event()
        self.gate.set()
        self.put_error: Exception | None = None

    def put(self, key: ChunkKey, blob: memoryview, *, stripe: int, timeout_s: float) -> bool:
        self.entered.set()
        assert self.gate.wait(20.0)
        if self.put_error is not None:
            raise self.put_error
        return super().put(key, blob, stripe=stripe, timeout_s=timeout_s)


async def settled(copies: SparseCopies) -> None:
    """Wait until nothing is under way, and all was told."""
    while len(copies) or copies._told or copies._telling.locked():
        await asyncio.sleep(0)


def stored(found: Reading, chunk: MadeChunk) -> memoryview:
    blob = aligned(BLOB)
    return blob[: found.disk.backend.get(copy_key(chunk), blob, timeout_s=1.0)]


@pytest.mark.parametrize("key_id", ["", ALICE])
async def test_a_kept_chunk_gets_its_copy(key_id: str) -> None:
    """Made of the pages in memory, with the place of its chunk; the scheduler hears of it once it is there."""
    async with reading(with_copies=False, key_id=key_id) as found, copying(found, key_id=key_id) as (copies, _):
        for chunk in found.chunks:
            copy = await copies.make(chunk.header, chunk.blob, key_id, 3.0)
            assert copy is not None
            await copies.finish(copy, is_kept=True)
        await settled(copies)

        for chunk in found.chunks:
            verify_copy(stored(found, chunk), copy_key(chunk), LAYOUT, cipher=CIPHER, key_id=key_id)
        assert sorted(found.told.there) == sorted(found.keys)
        assert (copies.written, copies.left_out) == (3, 0)
        assert (await found.kv_of(1, [0, 70, 191]))[0]
        # Only the last may go: those above it are continued.
        assert found.disk.index.shrink(found.disk.index.nbytes - 1) == (found.keys[2],)


async def test_a_chunk_that_was_not_kept_gets_none() -> None:
    """Nor does one that has a copy already, or one under way."""
    async with reading() as found, copying(found) as (copies, staging):
        assert await copies.make(found.chunks[0].header, found.chunks[0].blob, "") is None
        await found.disk.drop([found.keys[0]])
        copy = await copies.make(found.chunks[0].header, found.chunks[0].blob, "")
        assert copy is not None
        assert await copies.make(found.chunks[0].header, found.chunks[0].blob, "") is None
        await copies.finish(copy, is_kept=False)

        assert found.keys[0] not in found.disk
        assert (staging.taken, copies.written, copies.left_out) == (0, 0, 0)


async def test_without_memory_a_chunk_goes_without_a_copy() -> None:
    """No save ever waits for copies: with all buffers on their way, the next chunk is left out and counted."""
    backend = _Gated()
    async with reading(with_copies=False, backend=backend) as found, copying(found, buffers=2) as (copies, _):
        backend.gate.clear()
        made = [await copies.make(chunk.header, chunk.blob, "") for chunk in found.chunks]
        for copy in made[:2]:
            assert copy is not None
            await copies.finish(copy, is_kept=True)
        backend.gate.set()
        await settled(copies)

        assert made[2] is None
        assert (copies.written, copies.left_out) == (2, 1)
        assert [key in found.disk for key in found.keys] == [True, True, False]


@pytest.mark.parametrize("error", [CapacityError("full", code="disk_full"), KeyMissing("no key")])
async def test_a_copy_that_cannot_be_written_is_left_out(error: Exception) -> None:
    """The next one is tried all the same, and its memory comes back."""
    backend = _Gated()
    async with reading(with_copies=False, backend=backend) as found, copying(found) as (copies, staging):
        backend.put_error = error
        copy = await copies.make(found.chunks[0].header, found.chunks[0].blob, "")
        assert copy is not None
        await copies.finish(copy, is_kept=True)
        await settled(copies)

        assert (copies.written, copies.left_out, staging.taken) == (0, 1, 0)
        assert found.told.there == []
        assert found.keys[0] not in found.disk


async def test_what_was_dropped_meanwhile_does_not_come_back() -> None:
    """Neither what waits nor what is being written; other namespaces go on."""
    backend = _Gated()
    async with reading(with_copies=False, backend=backend) as found, copying(found) as (copies, _):
        backend.gate.clear()
        for chunk in found.chunks[:2]:
            copy = await copies.make(chunk.header, chunk.blob, "")
            assert copy is not None
            await copies.finish(copy, is_kept=True)
        await asyncio.to_thread(backend.entered.wait, 20.0)
        copies.forget("00" * 16)
        late = await copies.make(found.chunks[2].header, found.chunks[2].blob, "")
        assert late is not None
        copies.forget(found.chunks[0].header.namespace)
        await copies.finish(late, is_kept=True)
        backend.gate.set()
        await settled(copies)
        await found.disk.removals.drained()

        assert [key in found.disk for key in found.keys] == [False, False, False]
        assert found.told.there == []
        assert list(backend.entries()) == []


async def test_copies_are_told_of_some_at_a_time() -> None:
    """One event for those that were written while others waited."""
    async with (
        reading(chunks=40, with_copies=False) as found,
        copying(found, buffers=40, runs=False) as (copies, _),
    ):
        for chunk in found.chunks:
            copy = await copies.make(chunk.header, chunk.blob, "")
            assert copy is not None
            await copies.finish(copy, is_kept=True)
        running = asyncio.create_task(copies.run())
        await settled(copies)
        await copies.stop()
        await running

        assert len(found.told.there) == 40
        assert found.told.events <= 4


async def test_what_has_to_make_room_is_told() -> None:
    """A copy within the quota drives out what is worth less, which may be any chunk."""
    async with reading(chunks=3, with_copies=False, quota=2 * LAYOUT.blob_bytes(is_sealed=False)) as found:
        for chunk in found.chunks[:2]:
            await found.put(chunk, copy_of(chunk))
        async with copying(found) as (copies, _):
            copy = await copies.make(found.chunks[2].header, found.chunks[2].blob, "", 1e6)
            assert copy is not None
            await copies.finish(copy, is_kept=True)
            await settled(copies)

    assert found.keys[2] in found.disk
    assert len(found.told.gone) == 1
    assert found.told.there == [found.keys[2]]


async def test_a_stop_gives_up_what_waits() -> None:
    """And its memory is back when the run has ended."""
    async with reading(with_copies=False) as found, copying(found, runs=False) as (copies, staging):
        for chunk in found.chunks[:2]:
            copy = await copies.make(chunk.header, chunk.blob, "")
            assert copy is not None
            await copies.finish(copy, is_kept=True)
        late = await copies.make(found.chunks[2].header, found.chunks[2].blob, "")
        assert late is not None
        await copies.stop()
        await copies.run()
        await copies.finish(late, is_kept=True)

        assert await copies.make(found.chunks[2].header, found.chunks[2].blob, "") is None
        assert staging.taken == 0
        assert not any(key in found.disk for key in found.keys)
