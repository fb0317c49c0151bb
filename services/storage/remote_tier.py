"""The object store: what the disk does not have is looked for here, and what was saved goes here too, behind.

An upload waits in a bounded line as a name, not as a buffer: its blob is read from the disk again when it is its turn,
and compared with what was written, so a slow store holds no memory and never gets what the disk has spoilt. What
does not fit in the line, or fails, is on the disk all the same; it is counted, and no save fails for it.

An owner of namespaces may have a quota here, too (:mod:`core.remote_shares`): what would go beyond it is not uploaded.

What the store lacks, when to try again and when to leave it alone is for ``backends/object_store`` to know.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import islice

from services.storage import measures
from services.storage.backends import ChunkBackend, ChunkEntry, ChunkKey
from services.storage.buffers import Buffers
from services.storage.chunk_format import ChunkHeader
from services.storage.chunk_reading import ReadChunk
from services.storage.chunk_writing import blob_digest
from services.storage.core.remote_shares import RemoteShares
from services.storage.core.tier_health import TierHealth
from services.storage.io_threads import IoThreads
from shared import logs
from shared.errors import IntegrityError, ThermoclineError

MAX_UPLOADS = 4096
MOST_TRIES = 3
OVER_QUOTA = "its owner's quota in the object store is full"
COUNTED_AT_ONCE = 1000

_log = logs.get_logger("storage")


@dataclass(frozen=True, slots=True)
class Upload:
    """A chunk that is on the disk, to be copied to the store. ``digest`` is that of its blob."""

    key: ChunkKey
    place: int
    nbytes: int
    digest: int
    failures: int = 0


@dataclass(slots=True)
class Room:
    """Taken for one chunk of a namespace. ``error`` says why there is none; ``is_used`` that a write has filled it."""

    error: str = ""
    is_used: bool = False


class RemoteTier:
    """Owned by the event loop. ``run`` uploads until it is cancelled."""

    name = "remote"

    def __init__(
        self,
        backend: ChunkBackend,
        threads: IoThreads,
        *,
        timeout_s: float,
        max_uploads: int = MAX_UPLOADS,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.backend = backend
        self.timeout_s = timeout_s
        self.uploaded = 0
        self.upload_failures = 0
        self.refused = 0  # Chunks that were not what they should be.
        self._threads = threads
        self._clock_s = clock_s
        self._max_uploads = max_uploads
        self._uploads: deque[Upload] = deque()
        self._health = TierHealth(first_s=1.0, most_s=30.0)  # Of uploads.
        self._shares = RemoteShares()
        self._counting = asyncio.Lock()
        self._changed = asyncio.Event()

    @property
    def waiting(self) -> int:
        return len(self._uploads)

    async def read(self, key: ChunkKey, read: ReadChunk, buffer: memoryview, timeout_s: float) -> ChunkHeader | None:
        """The chunk in ``buffer``, opened and verified; None if the store lacks it.

        Raises IntegrityError when it is not what it should be (it stays where it is: others may be able to use it),
        TransportError when the store did not answer in time, ConfigError when there is no key for it.
        """
        started_s = self._clock_s()
        timeout_s = min(timeout_s, self.timeout_s)
        try:
            header = await self._threads.run(True, read, self.backend, key, buffer, timeout_s=timeout_s)
        except IntegrityError as error:
            self.refused += 1
            measures.BAD_CHUNKS.labels(self.name, error.code).inc()
            _log.warning("remote_chunk_refused", chunk=key.path, code=error.code, reason=error.message)
            raise
        if header is not None:
            measures.moved(self.name, "read", header.nbytes, self._clock_s() - started_s)
        return header

    @asynccontextmanager
    async def room(self, namespace: str, nbytes: int) -> AsyncIterator[Room]:
        """Room for one chunk within its owner's quota, given back at the end unless a write has used it.

        Whoever asks first has it first, so that of a prefix the beginning is kept: its end alone is of no use.
        """
        room = Room()
        try:
            if not await self._reserve(namespace, nbytes):
                room.error = OVER_QUOTA
                measures.UPLOADS.labels("over_quota").inc()
        except (ThermoclineError, OSError) as error:
            room.error = self._failed(error)
        try:
            yield room
        finally:
            if not room.error and not room.is_used:
                self._shares.give_back(namespace, nbytes)

    async def write(self, key: ChunkKey, place: int, blob: memoryview, room: Room | None = None) -> str:
        """Put a blob into the store, into the room that was taken for it or that there is now.

        Returns "", or why it could not be: ``OVER_QUOTA``, or what went wrong.
        """
        if room is None:
            async with self.room(key.namespace, blob.nbytes) as room:
                return await self.write(key, place, blob, room)
        if room.error:
            return room.error
        started_s, put = self._clock_s(), self.backend.put
        try:
            room.is_used = await self._threads.run(False, put, key, blob, stripe=place, timeout_s=self.timeout_s)
        except (ThermoclineError, OSError) as error:
            # The backend says in the log when the store goes away and when it is back.
            return self._failed(error)
        self.uploaded += 1
        measures.UPLOADS.labels("done").inc()
        measures.moved(self.name, "write", blob.nbytes, self._clock_s() - started_s)
        return ""

    def _failed(self, error: Exception) -> str:
        self.upload_failures += 1
        measures.UPLOADS.labels("failed").inc()
        return str(error)

    def own(self, namespace: str, owner: str, quota: int) -> None:
        """A namespace is this owner's, who may have ``quota`` bytes in the store from now on; 0 is no bound."""
        self._shares.learn(namespace, owner, quota)

    async def _reserve(self, namespace: str, nbytes: int) -> bool:
        """Whether a chunk is within its owner's quota; counts what is in the store first if that is not known.

        Raises as the backend's listing does.
        """
        async with self._counting:
            for name in self._shares.uncounted(namespace, self._clock_s()):
                await self._count(name)
            return self._shares.reserve(namespace, nbytes)

    async def _count(self, namespace: str) -> None:
        begun_s, nbytes, seen = self._clock_s(), 0, COUNTED_AT_ONCE
        self._shares.counting(namespace)
        entries = self.backend.entries(namespace)
        while seen == COUNTED_AT_ONCE:
            # A thread's turn for some at a time: saves go on between.
            seen, found = await self._threads.run(False, _count_some, entries)
            nbytes += found
        self._shares.counted(namespace, nbytes, begun_s)

    def upload(self, upload: Upload) -> None:
        """Put it in line; when that is full it is left out."""
        if len(self._uploads) >= self._max_uploads:
            self.upload_failures += 1
            measures.UPLOADS.labels("no_room").inc()
            return
        self._uploads.append(upload)
        measures.UPLOADS_WAITING.set(len(self._uploads))
        self._changed.set()

    def forget(self, namespace: str) -> None:
        """A namespace ("" is all) is being deleted: upload nothing of it that still waits."""
        self._shares.deleted(namespace)
        kept = [upload for upload in self._uploads if namespace and upload.key.namespace != namespace]
        self._uploads = deque(kept)
        measures.UPLOADS_WAITING.set(len(self._uploads))

    async def run(self, disk: ChunkBackend, buffers: Mapping[bytes, Buffers]) -> None:
        """Upload what is in line, one after the other, for ever. Several may run at once.

        ``buffers`` has those for chunks of each geometry, by its digest.
        """
        while True:
            if not self._uploads:
                self._changed.clear()
                await self._changed.wait()
                continue
            upload = self._uploads.popleft()
            measures.UPLOADS_WAITING.set(len(self._uploads))
            async with self.room(upload.key.namespace, upload.nbytes) as room:
                error = room.error or await self._upload(upload, room, disk, buffers[upload.key.geometry])
            if error is not None:
                await self._settle(upload, is_done=error in ("", OVER_QUOTA))

    async def _upload(self, upload: Upload, room: Room, disk: ChunkBackend, buffers: Buffers) -> str | None:
        """Bring it from the disk to the store. Returns as ``write`` does; None if the disk has it no more."""
        async with buffers.buffer(is_urgent=False) as buffer:
            try:
                nbytes = await self._threads.run(False, _read_again, disk, upload, buffer, self.timeout_s)
            except (ThermoclineError, OSError):
                nbytes = 0  # Whoever fetches it will find out what is wrong with the disk.
            if not nbytes:
                measures.UPLOADS.labels("gone").inc()
                return None
            return await self.write(upload.key, upload.place, buffer[:nbytes], room)

    async def _settle(self, upload: Upload, *, is_done: bool) -> None:
        """After a failure, try again later, a few times; until then the line stands still."""
        if is_done:
            self._health.worked()
            return
        self._health.failed(self._clock_s())
        if upload.failures + 1 < MOST_TRIES:
            self.upload(replace(upload, failures=upload.failures + 1))
        await asyncio.sleep(self._health.wait_s(self._clock_s()))


def _count_some(entries: Iterator[ChunkEntry]) -> tuple[int, int]:
    """(chunks seen, their bytes). Raises TransportError when the store fails."""
    some = list(islice(entries, COUNTED_AT_ONCE))
    return len(some), sum(entry.nbytes for entry in some)


def _read_again(disk: ChunkBackend, upload: Upload, buffer: memoryview, timeout_s: float) -> int:
    """The bytes of the blob, now at the front of ``buffer``; 0 if it is gone, or not what was written."""
    nbytes = disk.get(upload.key, buffer, timeout_s=timeout_s)
    return nbytes if nbytes == upload.nbytes and blob_digest(buffer[:nbytes]) == upload.digest else 0
