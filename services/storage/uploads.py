"""Uploads: background copies of the disk's chunks to the object store, many at once.

An upload waits in a bounded queue as a name, not as a buffer: its blob is read from the disk when it is its turn, and
compared with the blob that was saved, so a slow store holds no memory and never gets a blob that the disk has damaged.
A chunk that does not fit in the queue, or whose upload fails, is on the disk all the same; no save fails for it, and
``reconciliation`` finds it again.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from services.storage import measures
from services.storage.backends import REMOTE_WIDTH, ChunkBackend, ChunkKey
from services.storage.buffers import Buffers
from services.storage.chunk_format import read_fixed
from services.storage.chunk_keys import ChunkKeys
from services.storage.chunk_reading import VerifiedRead
from services.storage.chunk_writing import blob_digest, seal
from services.storage.core.tier_health import TierHealth
from services.storage.disk_tier import READ_TIMEOUT_S, DiskTier
from services.storage.io_threads import IoThreads
from services.storage.remote_tier import OVER_QUOTA, RemoteTier, Room
from shared import logs
from shared.chunks import geometry_id
from shared.errors import IntegrityError, KeyMissing, ThermoclineError
from shared.messages.pools import KvGeometry

MAX_UPLOADS = 4096
MOST_TRIES = 3

MOST_BYTES = 128 * 2**20
"""Bytes of blobs under way to the store at once, each a copy in memory; a larger one is uploaded alone."""

_log = logs.get_logger("storage")


@dataclass(frozen=True, slots=True)
class Upload:
    """A chunk that is on the disk, to be copied to the store.

    ``digest`` is that of its blob; None where no save of this process wrote it, so that it has to be verified.
    """

    key: ChunkKey
    nbytes: int
    digest: int | None = None
    failures: int = 0


@dataclass(frozen=True, slots=True)
class _Shape:
    geometry: KvGeometry
    buffers: Buffers


class Uploads:
    """The queue of uploads. Owned by the event loop. ``run`` uploads until it is cancelled."""

    def __init__(
        self,
        remote: RemoteTier,
        disk: DiskTier,
        threads: IoThreads,
        keys: ChunkKeys,
        *,
        on_bad: Callable[[list[ChunkKey]], Awaitable[None]],
        max_waiting: int = MAX_UPLOADS,
        width: int = REMOTE_WIDTH,
        most_bytes: int = MOST_BYTES,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """Prepare; ``on_bad`` is called with chunks of the disk that turn out to be bad."""
        self.left_out = 0  # Chunks that did not fit in the queue, or were given up.
        self.on_left_out: Callable[[], None] = lambda: None  # Called for each of them.
        self._remote = remote
        self._disk = disk
        self._threads = threads
        self._keys = keys
        self._on_bad = on_bad
        self._max_waiting = max_waiting
        self._width = width
        self._most_bytes = most_bytes
        self._clock_s = clock_s
        self._sleep = sleep
        self._shapes: dict[bytes, _Shape] = {}
        self._waiting: OrderedDict[ChunkKey, Upload] = OrderedDict()
        self._running: dict[ChunkKey, int] = {}  # Bytes of each.
        self._void: dict[ChunkKey, None] = {}  # Running uploads whose namespace was dropped since.
        self._health = TierHealth(first_s=1.0, most_s=30.0)
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """Return the number of chunks that wait or are under way."""
        return len(self._waiting) + len(self._running)

    @property
    def shapes(self) -> list[bytes]:
        """Digests of the geometries whose chunks can be uploaded."""
        return list(self._shapes)

    def open(self, geometry: KvGeometry, buffers: Buffers) -> None:
        """Upload chunks of this geometry too, by way of these buffers."""
        self._shapes[geometry_id(geometry)] = _Shape(geometry, buffers)

    def add(self, upload: Upload) -> None:
        """Queue an upload, unless it is there or under way; when the queue is full it is left out."""
        if upload.key in self._waiting or upload.key in self._running:
            return
        if len(self._waiting) >= self._max_waiting:
            self._leave_out("no_room")
            return
        self._waiting[upload.key] = upload
        self._wake()

    async def room(self) -> None:
        """Wait until half of the queue is free: the rest of it is for chunks saved meanwhile."""
        while len(self._waiting) > self._max_waiting // 2:
            await self._changed.wait()

    def forget(self, namespace: str) -> None:
        """Discard waiting and failing uploads of a namespace ("" is all): it is being deleted."""
        for key in [key for key in self._waiting if not namespace or key.namespace == namespace]:
            del self._waiting[key]
        self._void |= {key: None for key in self._running if not namespace or key.namespace == namespace}
        self._wake()

    async def ended(self, namespace: str = "") -> None:
        """Wait until no upload of a namespace ("" is all) is under way."""
        while any(not namespace or key.namespace == namespace for key in self._running):
            await self._changed.wait()

    async def run(self) -> None:
        """Upload queued chunks until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                while not self._may_begin():
                    await self._changed.wait()
                if wait_s := self._health.wait_s(self._clock_s()):
                    # After a failure the queue pauses for a while.
                    await self._sleep(wait_s)
                    continue
                key, upload = self._waiting.popitem(last=False)
                self._running[key] = upload.nbytes
                self._wake()
                group.create_task(self._bring(upload))

    def _may_begin(self) -> bool:
        if not self._waiting:
            return False
        nbytes = sum(self._running.values()) + self._waiting[next(iter(self._waiting))].nbytes
        return not self._running or (len(self._running) < self._width and nbytes <= self._most_bytes)

    async def _bring(self, upload: Upload) -> None:
        """Bring a chunk from the disk to the store, if there is room for it; a failure is retried a few times."""
        error: str | None = ""
        try:
            async with self._remote.room(upload.key.namespace, upload.nbytes) as room:
                error = room.error or await self._copy(upload, room)
        except Exception as caught:
            # One chunk must not end the others.
            _log.error("upload_raised", chunk=upload.key.path, exc_info=caught)
            error = str(caught) or type(caught).__name__
        finally:
            is_void = upload.key in self._void
            self._void.pop(upload.key, None)
            del self._running[upload.key]
            self._wake()
        if error in ("", OVER_QUOTA):
            self._health.worked()
        elif error is not None:
            self._health.failed(self._clock_s())
            if is_void:
                return
            if upload.failures + 1 < MOST_TRIES:
                self.add(replace(upload, failures=upload.failures + 1))
            else:
                self._leave_out("given_up")

    async def _copy(self, upload: Upload, room: Room) -> str | None:
        """Copy the chunk and return as ``RemoteTier.write`` does.

        None if the disk lacks it, its tenant's key is gone, or it may not be uploaded as it is.
        """
        blob = await self._read(upload) if self._disk.index.hold(upload.key) else b""
        with suppress(KeyMissing):
            if blob:
                return await self._remote.write(upload.key, blob, room)
        measures.UPLOADS.labels("gone").inc()
        return None

    async def _read(self, upload: Upload) -> bytes:
        """Return the blob of a chunk that the index holds; empty if it is not available, or must not be uploaded."""
        key, shape = upload.key, self._shapes[upload.key.geometry]
        try:
            await self._disk.pace.wait(upload.nbytes)
            # Copied out of the buffer, which others wait for, before the upload.
            async with shape.buffers.buffer(is_urgent=False) as buffer:
                if upload.digest is None:
                    read = partial(self._read_verified, key, shape.geometry, buffer)
                else:
                    read = partial(self._read_again, upload, buffer)
                where = self._disk.directories.of(key)
                return await self._disk.directories.run(
                    where, read, is_urgent=False, timeout_s=READ_TIMEOUT_S, uses=(buffer,)
                )
        except IntegrityError as error:
            self._disk.quarantine(key, error)
            await self._on_bad([key])
        except (ThermoclineError, OSError) as error:
            # A fetch of it will find out the fault of the disk.
            _log.info("chunk_not_uploaded", chunk=key.path, reason=str(error))
        finally:
            self._disk.index.release(key)
        return b""

    def _read_again(self, upload: Upload, buffer: memoryview) -> bytes:
        """Return the blob; empty if it is gone, or differs from what was written."""
        blob = _get(self._disk.backend, upload.key, buffer, self._remote.timeout_s)
        return bytes(blob) if blob.nbytes == upload.nbytes and blob_digest(blob) == upload.digest else b""

    def _read_verified(self, key: ChunkKey, geometry: KvGeometry, buffer: memoryview) -> bytes:
        """Return the blob, verified, and sealed again if it was sealed; empty if it is gone.

        Raises as ``VerifiedRead`` does, and KeyMissing for a chunk in the clear where chunks are sealed: it must not
        leave this machine.
        """
        blob = _get(self._disk.backend, key, buffer, self._remote.timeout_s)
        if not blob.nbytes:
            return b""
        key_id = read_fixed(blob, blob.nbytes).key_id
        if not key_id and self._keys.key_id(""):
            raise KeyMissing("the chunk is in the clear, and chunks are sealed here")
        header = VerifiedRead(geometry, self._keys.cipher, key_id).verify(blob, key)
        seal(blob, header, key_id, self._keys.cipher)
        return bytes(blob)

    def _leave_out(self, outcome: str) -> None:
        self.left_out += 1
        measures.UPLOADS.labels(outcome).inc()
        self.on_left_out()

    def _wake(self) -> None:
        measures.UPLOADS_WAITING.set(len(self._waiting))
        self._changed.set()
        self._changed = asyncio.Event()


def _get(disk: ChunkBackend, key: ChunkKey, buffer: memoryview, timeout_s: float) -> memoryview:
    return buffer[: disk.get(key, buffer, timeout_s=timeout_s)]
