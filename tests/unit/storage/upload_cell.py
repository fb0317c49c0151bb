"""A disk, an object store that can be held up, and the uploads between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from services.storage.backends import ChunkKey, IsStale, Stored
from services.storage.buffers import Buffers
from services.storage.chunk_format import blob_nbytes
from services.storage.chunk_keys import ChunkKeys
from services.storage.core.chunk_index import Arrival
from services.storage.disk_tier import DiskTier
from services.storage.io_threads import IoThreads
from services.storage.remote_tier import RemoteTier
from services.storage.staging import Staging
from services.storage.uploads import Uploads
from shared.chunks import geometry_id
from shared.errors import TransportError
from shared.messages.pools import KvGeometry
from tests.chunk_makers import SMALL, MadeChunk
from tests.memory_backend import MemoryBackend

NBYTES = blob_nbytes(SMALL)


class GatedStore(MemoryBackend):
    """Fails as often as told, and lets nothing through while its gate is closed."""

    def __init__(self, failures: int = 0) -> None:
        super().__init__(max_bytes=2**30)
        self.failures = failures
        self.tries = 0
        self.at_once = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def store(self, key: ChunkKey, blob: bytes, is_stale: IsStale, *, timeout_s: float) -> Stored:
        self.tries += 1
        self.at_once += 1
        await self.gate.wait()
        self.at_once -= 1
        if self.tries <= self.failures:
            raise TransportError("no route")
        return await super().store(key, blob, is_stale, timeout_s=timeout_s)


class ToldEvents:
    def __init__(self) -> None:
        self.gone: list[ChunkKey] = []

    async def dropped(self, keys: Sequence[ChunkKey]) -> None:
        self.gone += keys


class VirtualTime:
    """A clock that moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept_s: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds
        await asyncio.sleep(0)


class UploadCell:
    """A disk with the chunks of a chain, and uploads to a store."""

    def __init__(self, store: GatedStore, chain: list[MadeChunk], **settings: Any) -> None:
        self.store = store
        self.threads = IoThreads(4)
        self.files = MemoryBackend(max_bytes=2**30)
        self.disk = DiskTier(self.files, 2**30, self.threads)
        self.events = ToldEvents()
        time = VirtualTime()
        self.remote = RemoteTier(store, self.threads, timeout_s=5.0)
        self.uploads = Uploads(
            self.remote,
            self.disk,
            self.threads,
            ChunkKeys(None),
            on_bad=self.events.dropped,
            clock_s=lambda: time.now_s,
            sleep=time.sleep,
            **settings,
        )
        self.buffers = Buffers(Staging(2**20, NBYTES))
        self.open_shape(SMALL)
        self._chain = chain

    def open_shape(self, geometry: KvGeometry) -> None:
        self.uploads.open(geometry, self.buffers)

    def close_shape(self, geometry: KvGeometry) -> None:
        del self.uploads._shapes[geometry_id(geometry)]

    async def fill(self) -> None:
        for chunk in self._chain:
            await self.disk.write(Arrival(chunk.key, NBYTES, 0, None, 0.0), chunk.blob)

    async def idle(self) -> None:
        async with asyncio.timeout(20.0):
            while len(self.uploads):
                await asyncio.sleep(0.001)


@asynccontextmanager
async def uploading(store: GatedStore, chain: list[MadeChunk], **settings: Any) -> AsyncIterator[UploadCell]:
    cell = UploadCell(store, chain, **settings)
    await cell.fill()
    tasks = [asyncio.create_task(cell.uploads.run()), asyncio.create_task(cell.disk.removals.run())]
    try:
        yield cell
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        cell.buffers.close()
        cell.threads.close()
