"""Reading of chunks from the disk first, then the object store; unverified results are marked as such.

A chunk that only the store had is written to the disk afterwards, if there is capacity: the next fetch finds it nearer,
and the scheduler hears of it by ``ChunksListed``. A chunk of the disk without the sparse copy that it should have,
because it is older than the setting or there was no memory at the time, gets it when it is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from services.storage.backends import ChunkKey
from services.storage.buffers import Buffers
from services.storage.chunk_gathering import verify_into
from services.storage.chunk_keys import ChunkKeys
from services.storage.chunk_reading import VerifiedRead, open_chunk
from services.storage.core.fetch_check import FetchChunk
from services.storage.disk_tier import DiskTier
from services.storage.io_threads import Hung
from services.storage.promotions import Brought, Promotions
from services.storage.remote_tier import RemoteTier
from services.storage.sparse.copies import SparseCopies
from shared import logs
from shared.errors import IntegrityError, ThermoclineError
from shared.memory import HostPoolView
from shared.messages.pools import KvGeometry

_log = logs.get_logger("storage")


@dataclass(frozen=True, slots=True)
class Unverified:
    """The object store's blob under a chunk's name, in the clear; to be given back by :meth:`ChunkSource.finish`."""

    key: ChunkKey
    place: int
    blob: memoryview
    buffer: memoryview
    geometry: KvGeometry
    refuse: Callable[[IntegrityError], None]
    """Reports to the store's tier that it is not the chunk. On the event loop."""

    def put(self, chunk: FetchChunk, host: HostPoolView) -> Brought:
        """Verify the blob on its way to the host pool. Blocking. Raises IntegrityError."""
        header = open_chunk(self.blob, self.key, self.geometry)
        verify_into(chunk, self.blob, header, host)
        return Brought(self.key, self.place, "remote", header, self.blob, self.buffer, key_id="")

    def lost(self, error: IntegrityError) -> Lost:
        """Report a chunk that did not verify, and return it as lost. Runs on the event loop."""
        self.refuse(error)
        return Lost(is_missing=True, error=str(error))


@dataclass(frozen=True, slots=True)
class Lost:
    """A chunk that is not available. ``is_missing``: the disk was asked and does not have it, or not sound."""

    is_missing: bool
    error: str


class ChunkSource:
    """The tiers that chunks are read from. Owned by the event loop."""

    def __init__(
        self,
        geometry: KvGeometry,
        *,
        disk: DiskTier | None,
        remote: RemoteTier | None,
        buffers: Buffers,
        keys: ChunkKeys,
        promotions: Promotions | None,
        copies: SparseCopies | None = None,
    ) -> None:
        """Prepare to read; chunks without a sparse copy are given to ``copies``, if there is one."""
        self._geometry = geometry
        self._disk = disk
        self._remote = remote
        self._buffers = buffers
        self._keys = keys
        self._promotions = promotions
        self._copies = copies
        self._copying: set[asyncio.Task[None]] = set()  # Bounded by the number of buffers.

    def touch(self, chunks: list[FetchChunk]) -> None:
        """Count a request for this run as a use of each of its chunks on the disk."""
        if self._disk is not None:
            run = [chunk.key for chunk in chunks]
            self._disk.index.touch(run, chunks[0].place, None, self._disk.now_s())

    def take_lost(self) -> list[ChunkKey]:
        """Return chunks that reads found missing on the disk since the last call."""
        return [] if self._disk is None else self._disk.take_lost()

    def is_near(self, key: ChunkKey) -> bool:
        """Return whether the disk is believed to have it, or there is no object store to ask."""
        return self._remote is None or (self._disk is not None and key in self._disk)

    async def read(
        self, key: ChunkKey, place: int, ordered_key: str, left_s: Callable[[], float]
    ) -> Brought | Unverified | Lost:
        """Read one chunk within ``left_s()`` seconds. Errors of tiers are not raised but returned as :class:`Lost`."""
        read = VerifiedRead(self._geometry, self._keys.cipher, self._keys.key_id(ordered_key))
        buffer = await self._buffers.take(is_urgent=True)
        came: Brought | Unverified | Lost | None = None
        try:
            came = await self._read(key, place, read, buffer, left_s)
            return came
        finally:
            if came is None or isinstance(came, Lost):
                self._buffers.give_back(buffer, is_urgent=True)

    async def _read(
        self, key: ChunkKey, place: int, read: VerifiedRead, buffer: memoryview, left_s: Callable[[], float]
    ) -> Brought | Unverified | Lost:
        is_missing, error = False, ""
        if self._disk is not None:
            try:
                header = await self._disk.read(key, read, buffer)
                if header is not None:
                    return Brought(key, place, "disk", header, buffer[: header.nbytes], buffer, read.key_id)
            except Hung as caught:
                # The read goes on, and writes to the buffer when the disk answers: nothing may be opened in it now.
                # The store is asked by the next fetch, when the directory is left out. This one may have no time left,
                # and to wait for another buffer, which later chunks of it hold, could take all of it.
                return Lost(key not in self._disk, str(caught))
            except (ThermoclineError, OSError) as caught:
                is_missing, error = isinstance(caught, IntegrityError), str(caught)
        if self._remote is not None:
            try:
                came = await _from_remote(self._remote, key, place, read, buffer, max(0.001, left_s()))
                if came is not None:
                    return came
            except (ThermoclineError, OSError) as caught:
                is_missing, error = is_missing or isinstance(caught, IntegrityError), str(caught)
        # The index decides for the disk: the scheduler must not count on chunks that it does not list.
        return Lost(is_missing or (self._disk is not None and key not in self._disk), error)

    def finish(self, brought: Brought | Unverified, *, is_promoted: bool) -> None:
        """Give a chunk back; ``is_promoted`` has it written to the disk, where it was verified."""
        if isinstance(brought, Unverified):
            self._buffers.give_back(brought.buffer, is_urgent=True)
            return
        if is_promoted and self._promotions is not None and self._promotions.begin(brought):
            return  # The promotion gives the buffer back.
        if brought.source == "disk" and self._copies is not None and self._copies.is_lacking(brought.header):
            task = asyncio.create_task(self._copy(brought, self._copies), name="sparse copy")
            self._copying.add(task)
            task.add_done_callback(self._copying.discard)
            return
        self._buffers.give_back(brought.buffer, is_urgent=True)

    async def stop(self) -> None:
        """Return when every buffer was given back. Nothing is read any more."""
        if self._copying:
            await asyncio.wait(self._copying)

    async def _copy(self, brought: Brought, copies: SparseCopies) -> None:
        """Make the sparse copy, in the background: errors are only logged."""
        try:
            copy = await copies.make(brought.header, brought.blob, brought.key_id)
        except Exception as error:
            _log.warning("sparse_copy_not_made", chunk=brought.key.path, reason=str(error))
            return
        finally:
            self._buffers.give_back(brought.buffer, is_urgent=True)
        if copy is not None:
            await copies.finish(copy, is_kept=True)


async def _from_remote(
    remote: RemoteTier, key: ChunkKey, place: int, read: VerifiedRead, buffer: memoryview, timeout_s: float
) -> Brought | Unverified | None:
    """Read a chunk from the store; None if the store lacks it.

    A sealed blob is opened by a thread of its own; an unsealed one is verified later, on its way to the host pool, so
    that its bytes are read once.
    """
    if read.key_id:
        found = await remote.read(key, read, buffer, timeout_s)
        return None if found is None else Brought(key, place, "remote", *found, buffer, read.key_id)
    body = await remote.fetch(key, buffer.nbytes, timeout_s)
    return None if body is None else Unverified(key, place, body, buffer, read.geometry, partial(remote.refuse, key))
