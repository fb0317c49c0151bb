"""The object store: chunks that the disk lacks are read from it, and saved chunks go there too (``uploads``).

An object that fails verification when it is read stays until its chunk is uploaded again, and is overwritten then. An
owner of namespaces may have a quota here, too (:mod:`core.remote_shares`): chunks beyond it are not uploaded.
``backends/object_store`` remembers absent chunks, and decides when to try the store again and when to leave it alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice

from services.storage import measures
from services.storage.backends import ChunkEntry, ChunkKey, IsStale, RemoteBackend
from services.storage.chunk_format import ChunkHeader, read_fixed
from services.storage.chunk_reading import VerifiedRead
from services.storage.core.remote_shares import RemoteShares
from services.storage.io_threads import IoThreads
from services.storage.remote_owners import RemoteOwners
from shared import logs
from shared.errors import IntegrityError, KeyMissing, ThermoclineError

OVER_QUOTA = "its owner's quota in the object store is full"
COUNTED_AT_ONCE = 1000
MAX_BAD = 16_384
"""Most remembered objects that failed verification; beyond that, the oldest are forgotten."""

_log = logs.get_logger("storage")


@dataclass(slots=True)
class Room:
    """Room taken for one chunk of a namespace.

    ``error`` says why there is none; ``is_used`` that a write has filled it.
    """

    error: str = ""
    is_used: bool = False


class RemoteTier:
    """The chunks in the object store. Owned by the event loop."""

    name = "remote"

    def __init__(
        self,
        backend: RemoteBackend,
        threads: IoThreads,
        *,
        timeout_s: float,
        directories: Sequence[str] = (),
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; owners' quotas are kept in ``directories`` over restarts."""
        self.backend = backend
        self.timeout_s = timeout_s
        self.uploaded = 0
        self.upload_failures = 0
        self.refused = 0  # Objects that failed verification.
        self.replaced = 0  # Bad objects that were overwritten.
        self._threads = threads
        self._clock_s = clock_s
        self._bad: dict[ChunkKey, None] = {}
        self._shares = RemoteShares()
        self.owners = RemoteOwners(self._shares, directories)
        self._counting = asyncio.Lock()

    async def read(
        self, key: ChunkKey, read: VerifiedRead, buffer: memoryview, timeout_s: float
    ) -> tuple[ChunkHeader, memoryview] | None:
        """Read the chunk, opened in ``buffer`` and verified there; return None if the store lacks it.

        Raises IntegrityError when it is damaged or another (it stays until its chunk is uploaded again), TransportError
        when the store did not answer in time, ConfigError when there is no key for it.
        """
        body = await self.fetch(key, buffer.nbytes, timeout_s)
        if body is None:
            return None
        blob = buffer[: body.nbytes]
        try:
            return await self._threads.run(True, _open, read, body, key, blob), blob
        except IntegrityError as error:
            self.refuse(key, error)
            raise

    async def fetch(self, key: ChunkKey, most: int, timeout_s: float) -> memoryview | None:
        """Read the store's object with the chunk's name, not verified, at most ``most`` bytes.

        Return None if there is none. Raises IntegrityError if there is more, TransportError when the store did not
        answer in time.
        """
        started_s = self._clock_s()
        try:
            body = await self.backend.fetch(key, most, timeout_s=min(timeout_s, self.timeout_s))
        except IntegrityError as error:
            self.refuse(key, error)
            raise
        if body is not None:
            measures.moved(self.name, "read", body.nbytes, self._clock_s() - started_s)
        return body

    def refuse(self, key: ChunkKey, error: IntegrityError) -> None:
        """Mark an object that :meth:`fetch` brought as bad: it is overwritten when its chunk is uploaded again."""
        self._bad[key] = None
        if len(self._bad) > MAX_BAD:
            del self._bad[next(iter(self._bad))]
        self.refused += 1
        measures.BAD_CHUNKS.labels(self.name, error.code).inc()
        _log.warning("remote_chunk_refused", chunk=key.path, code=error.code, reason=error.message)

    @asynccontextmanager
    async def room(self, namespace: str, nbytes: int) -> AsyncIterator[Room]:
        """Take room for one chunk within its owner's quota.

        It is given back at the end of the block unless a write has used it. Calls are served in order, so that the
        beginning of a prefix is kept: its end alone is of no use.
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

    async def write(self, key: ChunkKey, blob: bytes | memoryview, room: Room | None = None) -> str:
        """Put a blob into the store, into the room that was taken for it or that there is now.

        An existing object stays, unless it is not this chunk. Return "", or why it failed: ``OVER_QUOTA``, or the
        error. Raises KeyMissing, which is no failure of the store, for a chunk that cannot be named.
        """
        if room is None:
            async with self.room(key.namespace, len(blob)) as room:
                return await self.write(key, blob, room)
        if room.error:
            return room.error
        started_s = self._clock_s()
        try:
            # A copy, because an abandoned write may still read it when the buffer is used again.
            body = blob if isinstance(blob, bytes) else await self._threads.run(False, bytes, blob)
            is_stale = _stale_check(body, is_bad=key in self._bad)
            stored = await self.backend.store(key, body, is_stale, timeout_s=self.timeout_s)
        except KeyMissing:
            raise
        except (ThermoclineError, OSError) as error:
            # The backend logs when the store goes away and when it is back.
            return self._failed(error)
        room.is_used = stored == "new"
        self._bad.pop(key, None)
        if stored == "replaced":
            self.replaced += 1
            _log.info("remote_chunk_replaced", chunk=key.path)
        self.uploaded += 1
        measures.UPLOADS.labels("replaced" if stored == "replaced" else "done").inc()
        measures.moved(self.name, "write", len(body), self._clock_s() - started_s)
        return ""

    def _failed(self, error: Exception) -> str:
        self.upload_failures += 1
        measures.UPLOADS.labels("failed").inc()
        return str(error)

    async def _reserve(self, namespace: str, nbytes: int) -> bool:
        """Return whether a chunk is within its owner's quota; counts the store's objects first if that is not known.

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
            # One thread's turn for each part, so that saves go on in between.
            seen, found = await self._threads.run(False, _count_some, entries)
            nbytes += found
        self._shares.counted(namespace, nbytes, begun_s)

    def forget(self, namespace: str) -> None:
        """Void the counts of a namespace ("" is all) that is being deleted."""
        self._shares.deleted(namespace)


def _count_some(entries: Iterator[ChunkEntry]) -> tuple[int, int]:
    """Return (chunks seen, their bytes). Raises TransportError when the store fails."""
    some = list(islice(entries, COUNTED_AT_ONCE))
    return len(some), sum(entry.nbytes for entry in some)


def _open(read: VerifiedRead, body: memoryview, key: ChunkKey, blob: memoryview) -> ChunkHeader:
    blob[:] = body
    return read.verify(blob, key)


def _stale_check(blob: bytes, *, is_bad: bool) -> IsStale:
    """Return a test for objects that do not belong under the name of ``blob``, a whole chunk, sealed or not.

    These are an object that failed verification when it was read (``is_bad``), one whose header is damaged, and one
    whose header names another chunk or another key, such as a chunk in the clear where chunks are sealed. Two
    exceptions stay: a sealed object where ``blob`` is in the clear, since a storage without keys must not undo
    encryption, and one of another version of the format, which another release wrote.
    """
    ours = read_fixed(memoryview(blob), len(blob))

    def is_stale(nbytes: int, front: bytes) -> bool:
        try:
            theirs = read_fixed(memoryview(front), nbytes)
        except IntegrityError as error:
            return error.code != "unknown_version"
        if theirs.is_sealed and not ours.is_sealed:
            return False
        return is_bad or theirs != ours

    return is_stale
