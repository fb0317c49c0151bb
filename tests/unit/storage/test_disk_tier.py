"""The disk with its index: what is kept, and what happens when it is full or broken. Time is a list of one figure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.storage.backends import ChunkKey
from services.storage.chunk_keys import NoCipher
from services.storage.chunk_reading import VerifiedRead
from services.storage.core.chunk_index import Arrival
from services.storage.core.read_budget import BURST_S
from services.storage.disk_tier import DiskTier
from services.storage.io_threads import IoThreads
from services.storage.paced_reads import PacedReads
from shared.errors import CapacityError, IntegrityError, TransportError
from tests.chunk_makers import SMALL, MadeChunk, aligned, make_chain
from tests.memory_backend import MemoryBackend

READ = VerifiedRead(SMALL, NoCipher(), "")
CHAIN = make_chain(4, seed=1)
NBYTES = CHAIN[0].blob.nbytes


class _Disk(MemoryBackend):
    """A disk in memory that fails as told, and notes what is set aside."""

    name = "disk"

    def __init__(self, *put_errors: Exception) -> None:
        super().__init__(max_bytes=2**30)
        self.put_errors = list(put_errors)
        self.get_errors: list[Exception] = []
        self.set_aside: list[ChunkKey] = []
        self.puts = self.gets = 0

    def put(self, key: ChunkKey, blob: memoryview, *, stripe: int, timeout_s: float) -> bool:
        self.puts += 1
        if self.put_errors:
            raise self.put_errors.pop(0)
        return super().put(key, blob, stripe=stripe, timeout_s=timeout_s)

    def get(self, key: ChunkKey, into: memoryview, *, timeout_s: float) -> int:
        self.gets += 1
        if self.get_errors:
            raise self.get_errors.pop(0)
        return super().get(key, into, timeout_s=timeout_s)

    def quarantine(self, key: ChunkKey, *, timeout_s: float) -> bool:
        self.set_aside.append(key)
        return super().quarantine(key, timeout_s=timeout_s)


@asynccontextmanager
async def _tier(disk: _Disk, quota: int = 2**20, now: list[float] | None = None) -> AsyncIterator[DiskTier]:
    clock = now or [0.0]
    tier = DiskTier(disk, quota, IoThreads(2), clock_s=lambda: clock[0])
    removing = asyncio.create_task(tier.removals.run())
    try:
        yield tier
    finally:
        tier.removals.stop()
        await removing


def _arrival(chunk: MadeChunk, place: int = 0, value: float = 0.0) -> Arrival:
    return Arrival(chunk.key, chunk.blob.nbytes, place, None, value)


async def test_a_limited_disk_is_asked_for_no_more_than_it_may_give() -> None:
    """A read waits for the bytes of its chunk; while it waits the chunk stays, and cut off it lets go of it."""
    disk, waiting = _Disk(), asyncio.Event()
    asked_s: list[float] = []

    async def forever(seconds: float) -> None:
        asked_s.append(seconds)
        waiting.set()
        await asyncio.Event().wait()

    async with _tier(disk) as tier:
        await tier.write(_arrival(CHAIN[0]), CHAIN[0].blob)
        tier.pace = PacedReads(NBYTES, clock_s=lambda: 0.0, sleep=forever)
        reading = asyncio.create_task(tier.read(CHAIN[0].key, READ, aligned(NBYTES)))
        await waiting.wait()
        kept = tier.index.shrink(0)
        reading.cancel()
        await asyncio.wait({reading})
        dropped = tier.index.shrink(0)

    assert asked_s == [pytest.approx(1.0 - BURST_S)]
    assert (kept, dropped, disk.gets) == ((), (CHAIN[0].key,), 0)


async def test_a_chunk_is_kept_once() -> None:
    """What is there is not written again; what is read is verified."""
    disk = _Disk()
    async with _tier(disk) as tier:
        outcomes = [(await tier.write(_arrival(CHAIN[0]), CHAIN[0].blob)).outcome for _ in range(2)]
        header = await tier.read(CHAIN[0].key, READ, aligned(NBYTES))
        lacking = await tier.read(CHAIN[1].key, READ, aligned(NBYTES))

    assert outcomes == ["stored", "there"]
    assert disk.puts == 1
    assert header is not None
    assert header.identity == CHAIN[0].key.identity
    assert lacking is None
    assert disk.gets == 1


async def test_room_is_made_and_files_go_behind() -> None:
    """The victim is forgotten when it must go; its file is deleted before the end."""
    disk, now = _Disk(), [0.0]
    async with _tier(disk, 2 * NBYTES, now) as tier:
        for number in range(3):
            now[0] += 1
            written = await tier.write(_arrival(CHAIN[number]), CHAIN[number].blob)

    assert (written.outcome, written.victims) == ("stored", (CHAIN[0].key,))
    assert [entry.key for entry in disk.entries()] == [CHAIN[1].key, CHAIN[2].key]


async def test_a_victim_that_comes_back_is_there() -> None:
    """Evicted, and saved again before its file is gone: the file that is there at the end is the new one."""
    disk, now = _Disk(), [0.0]
    async with _tier(disk, NBYTES, now) as tier:
        for number in (0, 1, 0, 1, 0):
            now[0] += 1
            await tier.write(_arrival(CHAIN[number]), CHAIN[number].blob)
        found = await tier.read(CHAIN[0].key, READ, aligned(NBYTES))
        await tier.removals.drained()

    assert found is not None
    assert [entry.key for entry in disk.entries()] == [CHAIN[0].key]


async def test_a_full_disk_is_left_alone_for_a_while() -> None:
    """Evicting once and trying once more; then nobody tries until the pause is over, and a success ends it."""
    disk, now = _Disk(), [10.0]
    async with _tier(disk, now=now) as tier:
        await tier.write(_arrival(CHAIN[0]), CHAIN[0].blob)
        disk.put_errors = [CapacityError("full"), CapacityError("full")]
        full = await tier.write(_arrival(CHAIN[1]), CHAIN[1].blob)
        paused = await tier.write(_arrival(CHAIN[2]), CHAIN[2].blob)
        tries = disk.puts
        now[0] += 6.0
        again = await tier.write(_arrival(CHAIN[2]), CHAIN[2].blob)
        after = await tier.write(_arrival(CHAIN[3]), CHAIN[3].blob)

    assert (full.outcome, full.victims, full.error) == ("full", (CHAIN[0].key,), "full")
    assert (paused.outcome, tries) == ("full", 3)
    assert (again.outcome, after.outcome) == ("stored", "stored")


async def test_one_eviction_may_be_enough() -> None:
    """When the second try succeeds there is no pause."""
    disk = _Disk()
    async with _tier(disk) as tier:
        await tier.write(_arrival(CHAIN[0]), CHAIN[0].blob)
        disk.put_errors = [CapacityError("full")]
        written = await tier.write(_arrival(CHAIN[1]), CHAIN[1].blob)
        after = await tier.write(_arrival(CHAIN[2]), CHAIN[2].blob)

    assert (written.outcome, written.victims) == ("stored", (CHAIN[0].key,))
    assert after.outcome == "stored"


@pytest.mark.parametrize("error", [TransportError("gone"), OSError(5, "I/O error")])
async def test_a_disk_that_fails_to_write_is_left_alone(error: Exception) -> None:
    """Its error is an answer, and nothing is counted as kept."""
    disk = _Disk(error)
    async with _tier(disk) as tier:
        failed = await tier.write(_arrival(CHAIN[0]), CHAIN[0].blob)
        paused = await tier.write(_arrival(CHAIN[0]), CHAIN[0].blob)

        assert (failed.outcome, paused.outcome, disk.puts) == ("failed", "failed", 1)
        assert (len(tier.index), tier.index.reserved) == (0, 0)


async def test_a_chunk_that_cannot_be_read_is_not_there_any_more() -> None:
    """The others are read as before."""
    disk = _Disk()
    async with _tier(disk) as tier:
        for chunk in CHAIN[:2]:
            await tier.write(_arrival(chunk), chunk.blob)
        disk.get_errors = [TransportError("gone")]
        with pytest.raises(TransportError):
            await tier.read(CHAIN[0].key, READ, aligned(NBYTES))
        found = await tier.read(CHAIN[1].key, READ, aligned(NBYTES))

        assert CHAIN[0].key not in tier
        assert found is not None


async def test_a_bad_chunk_is_set_aside() -> None:
    """It is counted by what was wrong, quarantined, and may be written anew."""
    disk = _Disk()
    async with _tier(disk) as tier:
        bad = aligned(NBYTES)
        bad[:] = CHAIN[0].blob
        bad[-1] ^= 1
        await tier.write(_arrival(CHAIN[0]), bad)
        with pytest.raises(IntegrityError):
            await tier.read(CHAIN[0].key, READ, aligned(NBYTES))
        again = await tier.write(_arrival(CHAIN[0]), CHAIN[0].blob)
        header = await tier.read(CHAIN[0].key, READ, aligned(NBYTES))

        assert tier.quarantined_by_reason == {"wrong_checksum": 1}
    assert disk.set_aside == [CHAIN[0].key]
    assert again.outcome == "stored"
    assert header is not None


async def test_a_file_that_vanished_is_forgotten() -> None:
    """Somebody deleted it behind our back: it is not there, and the next write brings it back."""
    disk = _Disk()
    async with _tier(disk) as tier:
        await tier.write(_arrival(CHAIN[0]), CHAIN[0].blob)
        disk.delete(CHAIN[0].key, timeout_s=1.0)
        gone = await tier.read(CHAIN[0].key, READ, aligned(NBYTES))
        again = await tier.write(_arrival(CHAIN[0]), CHAIN[0].blob)

    assert gone is None
    assert again.outcome == "stored"
