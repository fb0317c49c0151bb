"""Checking the disk keeps to the limit of its reading, and a call is answered all the same."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.storage import scrubber as scrubbing
from services.storage.buffers import Buffers
from services.storage.chunk_format import blob_nbytes
from services.storage.chunk_keys import NoCipher
from services.storage.core.chunk_index import Arrival
from services.storage.disk_tier import DiskTier
from services.storage.io_threads import IoThreads
from services.storage.paced_reads import PacedReads
from services.storage.scrubber import Scrubber
from services.storage.staging import Staging
from shared.errors import Unavailable
from shared.messages.status import VerifyChunks
from tests.chunk_makers import SMALL, make_chain
from tests.disk_node import Faults, Told, running
from tests.memory_backend import MemoryBackend

CHAIN = make_chain(3, seed=1)
NBYTES = CHAIN[0].blob.nbytes


class _Events:
    async def dropped(self, keys: Any) -> None:
        assert not keys


@asynccontextmanager
async def _scrubber(pace: PacedReads) -> AsyncIterator[Scrubber]:
    """Over a disk with three sound chunks."""
    threads = IoThreads(1)
    disk = DiskTier(MemoryBackend(max_bytes=2**30), 2**20, threads, pace=pace)
    removing = asyncio.create_task(disk.removals.run())
    buffers = Buffers(Staging(2**20, blob_nbytes(SMALL)))
    try:
        for chunk in CHAIN:
            await disk.write(Arrival(chunk.key, NBYTES, 0, None, 0.0), chunk.blob)
        made = Scrubber(disk, _Events(), NoCipher())  # type: ignore[arg-type]
        made.add(SMALL, buffers)
        yield made
    finally:
        disk.removals.stop()
        await removing
        buffers.close()
        threads.close()


async def test_every_chunk_waits_for_its_bytes() -> None:
    """A limited disk is checked no faster than it may be read."""
    slept_s: list[float] = []

    async def sleep(seconds: float) -> None:
        slept_s.append(seconds)

    async with _scrubber(PacedReads(NBYTES, clock_s=lambda: 0.0, sleep=sleep)) as scrubber:
        found = await scrubber.verify(VerifyChunks())

    assert (found.checked, found.nbytes, found.next_after) == (3, 3 * NBYTES, "")
    assert slept_s == [pytest.approx(seconds - 0.05) for seconds in (1.0, 2.0, 3.0)]


async def test_a_disk_without_reading_left_is_said_to_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call ends in time: with what was checked and where to go on, or with an error that says when to ask again."""
    monkeypatch.setattr(scrubbing, "CALL_S", 0.05)
    let_through = [0.0]

    async def sleep(seconds: float) -> None:
        if not let_through:
            await asyncio.Event().wait()
        let_through.pop()

    async with _scrubber(PacedReads(NBYTES, clock_s=lambda: 0.0, sleep=sleep)) as scrubber:
        first = await scrubber.verify(VerifyChunks())
        with pytest.raises(Unavailable, match="ask again later"):
            await scrubber.verify(VerifyChunks(after=first.next_after))

    assert first.checked == 1
    assert first.next_after == min(chunk.key.path for chunk in CHAIN)


@pytest.mark.parametrize(("fault", "again_there"), [(errno.EIO, "stored"), (errno.EMFILE, "there")])
async def test_a_chunk_that_cannot_be_read_is_told_and_done_without(
    tmp_path: Path, fault: int, again_there: str
) -> None:
    """The others are checked on, and a save writes it anew; not where only descriptors were lacking."""
    calls, told = Faults(), Told()
    calls.errno = fault
    async with running([str(tmp_path)], 2**20, calls) as node:
        await node.save(CHAIN)
        scrubber = Scrubber(node.tier, told, NoCipher())  # type: ignore[arg-type]
        buffers = Buffers(Staging(2**20, blob_nbytes(SMALL)))
        scrubber.add(SMALL, buffers)
        bad = f"{CHAIN[1].key.identity.hex()}.chunk"
        calls.is_bad = lambda path: path.startswith("reading") and path.endswith(bad) and "/chunks/" in path
        found = await scrubber.verify(VerifyChunks())
        calls.is_bad = lambda path: False
        again = await node.save(CHAIN)
        buffers.close()

    assert found.checked == 3
    assert len(found.bad) == (again_there == "stored")
    assert all(reason.startswith(f"{CHAIN[1].key.identity.hex()}:") for reason in found.bad)
    assert again == ["there", again_there, "there"]
