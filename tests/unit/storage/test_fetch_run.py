"""One fetch from the object store: nothing that is not what it should be, and few calls of threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from services.storage.backends import ChunkKey
from services.storage.buffers import Buffers
from services.storage.chunk_format import payload_view
from services.storage.chunk_keys import ChunkKeys
from services.storage.chunk_source import ChunkSource
from services.storage.core.fetch_check import FetchChunk
from services.storage.core.fetch_progress import FetchProgress
from services.storage.fetch_run import FetchRun
from services.storage.io_threads import IoThreads
from services.storage.remote_tier import RemoteTier
from services.storage.staging import Staging
from shared.chunks import chunk_pages
from shared.memory import HostPoolView
from tests.chunk_makers import SMALL, make_chain
from tests.memory_backend import MemoryBackend

CHAIN = make_chain(18, seed=3)
NBYTES = CHAIN[0].blob.nbytes
PAGES = chunk_pages(SMALL.page_size)


class _Gated(MemoryBackend):
    """Answers all fetches at once, when as many as it waits for were asked."""

    def __init__(self, waits_for: int) -> None:
        super().__init__(max_bytes=2**24)
        self.left = waits_for
        self.all_asked = asyncio.Event()

    async def fetch(self, key: ChunkKey, most: int, *, timeout_s: float) -> memoryview | None:
        self.left -= 1
        if self.left <= 0:
            self.all_asked.set()
        await self.all_asked.wait()
        into = memoryview(bytearray(most))
        nbytes = self.get(key, into, timeout_s=timeout_s)
        return into[:nbytes] if nbytes else None


class _Counted(IoThreads):
    calls = 0

    async def run(self, is_urgent: bool, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return await super().run(is_urgent, function, *args, **kwargs)


class _Cell:
    """A host pool above a store that has the chain."""

    def __init__(self, shm_prefix: str) -> None:
        self.store, self.threads = _Gated(len(CHAIN)), _Counted(4)
        for chunk in CHAIN:
            self.store.put(chunk.key, chunk.blob, stripe=0, timeout_s=1.0)
        self.remote = RemoteTier(self.store, self.threads, timeout_s=10.0)
        self.buffers = Buffers(Staging(len(CHAIN) * NBYTES, NBYTES))
        self.source = ChunkSource(
            SMALL, disk=None, remote=self.remote, buffers=self.buffers, keys=ChunkKeys(None), promotions=None
        )
        self.host = HostPoolView.create(shm_prefix, SMALL, len(CHAIN) * PAGES)
        self.progress = FetchProgress(len(CHAIN))
        self.reports = 0

    def damage(self, place: int) -> None:
        """Flip a bit of a chunk's payload in the store."""
        chunk = CHAIN[place]
        blob = bytearray(chunk.blob)
        blob[chunk.header.header_bytes] ^= 1
        self.store.replace(chunk.key, memoryview(blob), timeout_s=1.0)

    async def bring(self) -> str:
        chunks = [
            FetchChunk(chunk.key, place, chunk.header.identities, np.arange(PAGES, dtype=np.int32) + place * PAGES)
            for place, chunk in enumerate(CHAIN)
        ]
        run = FetchRun(chunks, self.progress, self.source, self.threads, self.host, key_id="", left_s=lambda: 10.0)

        async def report() -> None:
            self.reports += 1

        return await run.bring(report)

    def held(self) -> int:
        """Chunks, in order, whose pages the pool has, sealed and right."""
        for place, chunk in enumerate(CHAIN):
            pages = self.host.pages[place * PAGES : (place + 1) * PAGES]
            identities = self.host.identities[place * PAGES : (place + 1) * PAGES]
            checksums = self.host.checksums[place * PAGES : (place + 1) * PAGES]
            if identities.tobytes() != chunk.header.identities:
                return place
            assert pages.tobytes() == bytes(payload_view(chunk.blob, SMALL))
            assert np.array_equal(checksums, chunk.header.checksums)
        return len(CHAIN)


@pytest.fixture
async def cell(shm_prefix: str) -> AsyncIterator[_Cell]:
    made = _Cell(shm_prefix)
    yield made
    made.host.unlink()
    made.host.close()
    made.buffers.close()
    made.threads.close()


async def test_what_came_together_takes_one_thread_call_to_verify_and_to_put(cell: _Cell) -> None:
    """As many calls as the run is reported in parts, not some for each chunk."""
    error = await cell.bring()

    assert (error, cell.held(), cell.progress.remote_chunks) == ("", 18, 18)
    assert (cell.threads.calls, cell.reports) == (9, 8)
    assert cell.buffers.taken == 0


@pytest.mark.parametrize("place", [0, 4, 5, 17])
async def test_a_damaged_object_ends_the_run_before_it(cell: _Cell, place: int) -> None:
    """What comes before it stays, nothing of it or behind it is put, and it is written over when it comes by."""
    cell.damage(place)

    error = await cell.bring()

    assert "wrong checksum" in error
    assert (cell.held(), cell.progress.chunks) == (place, place)
    assert cell.progress.missing == [CHAIN[place].key]
    assert not cell.host.identities[place * PAGES :].any()
    assert cell.buffers.taken == 0
    assert cell.remote.refused == 1
    assert await cell.remote.write(CHAIN[place].key, CHAIN[place].blob) == ""
    assert cell.remote.replaced == 1


async def test_an_object_that_is_gone_ends_the_run_before_it(cell: _Cell) -> None:
    """It is lost, not an error."""
    cell.store.delete(CHAIN[5].key, timeout_s=1.0)

    error = await cell.bring()

    assert (error, cell.held(), cell.progress.missing) == ("", 5, [])
    assert cell.buffers.taken == 0
