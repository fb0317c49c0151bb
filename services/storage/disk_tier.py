"""The disk: a backend, the index of what it holds, and what to do when it is full or broken.

Decisions are the index's and the health's; this module puts them around blocking calls. The index is changed on the
event loop alone, so that all callers see one truth: a chunk is there once its ``put`` returned, and is not there
any more the moment it has to go, whenever its file goes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from services.storage import measures
from services.storage.backends import ChunkBackend, ChunkEntry, ChunkKey, Directories, PartialReads
from services.storage.buffers import Buffers
from services.storage.chunk_format import ChunkHeader
from services.storage.chunk_reading import ReadChunk
from services.storage.core.chunk_index import Arrival, ChunkIndex
from services.storage.core.tier_health import TierHealth
from services.storage.io_threads import Hung, IoThreads
from services.storage.paced_reads import PacedReads
from services.storage.removals import Removals
from services.storage.sparse.part_reading import PartFailure
from services.storage.used_directories import OWN_SHARE, UsedDirectories
from shared import logs
from shared.errors import CapacityError, IntegrityError, NotFound, ThermoclineError, TransportError
from shared.messages.storage_plans import DiskQuota

READ_TIMEOUT_S = 10.0
"""Not what is left of a fetch: a disk that took longer than a fetch had time for has not failed."""

WRITE_TIMEOUT_S = 30.0

FORGOTTEN_AT_ONCE = 4096
"""Chunks of a large drop between which the event loop serves others."""

_log = logs.get_logger("storage")

Outcome = Literal["stored", "there", "arriving", "no_room", "full", "failed"]


@dataclass(frozen=True, slots=True)
class Written:
    """What became of a write. ``victims`` had to go for it, whatever its outcome."""

    outcome: Outcome
    victims: tuple[ChunkKey, ...] = ()
    error: str = ""


class ReadParts(Protocol):
    """Reads parts of chunks by way of a buffer, in a thread, until one fails."""

    def __call__(self, buffer: memoryview) -> PartFailure | None:
        """Read them. Blocking."""

    def abandon(self) -> None:
        """Abandon it: from now on it writes only to its buffer."""


class DiskTier:
    """Owned by the event loop."""

    name = "disk"

    def __init__(
        self,
        backend: ChunkBackend,
        quota: int,
        threads: IoThreads,
        *,
        pace: PacedReads | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keep reads to ``pace``; None is no limit."""
        self._directories = backend if isinstance(backend, Directories) else None
        self.index = ChunkIndex(quota)
        self.directories = UsedDirectories(backend, self.index, threads)
        self.removals = Removals(self.directories.delete)
        self.quarantined_by_reason: dict[str, int] = {}
        self._reason = ""  # Of the last failure,
        self._refused_nbytes = 0  # and the chunk that there was no room for.
        self._lost: dict[ChunkKey, None] = {}  # By reading; see :meth:`take_lost`.
        self.backend = backend
        self.pace = pace or PacedReads(0)
        self._clock_s = clock_s
        self._health = TierHealth(first_s=1.0, most_s=30.0)
        self._admission = TierHealth(first_s=5.0, most_s=60.0)
        self._full_turn = asyncio.Lock()
        measures.DISK_QUOTA.set(quota)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self.index

    def now_s(self) -> float:
        """Return the clock of the index, in seconds."""
        return self._clock_s()

    @property
    def fault(self) -> str:
        """Why the disk is left alone, or was until it is tried again; "" while it works."""
        return self._reason if self._health.is_failing else ""

    @property
    def is_full(self) -> bool:
        """Nothing new is kept, because the file system has no room, whatever the quota."""
        return self._admission.is_failing

    def has_room(self, free_bytes: int) -> None:
        """Note the free space of the file system: what would fit now is kept again. Called without writes, too."""
        is_due = self._admission.is_failing and self._admission.may_try(self._clock_s())
        if is_due and free_bytes >= self._refused_nbytes and self._admission.worked():
            _log.info("disk_has_room_again")

    def may_try(self) -> bool:
        """Whether the disk is not left alone now."""
        return self._health.may_try(self._clock_s())

    def works(self) -> None:
        """Somebody has tried the disk, and it works."""
        self._worked()

    async def write(self, arrival: Arrival, blob: memoryview) -> Written:
        """Keep a chunk, if it is worth it and the disk takes it. Never raises what the disk raised."""
        key, now_s = arrival.key, self._clock_s()
        if key in self.index:
            return Written("there")
        if self.index.is_arriving(key):
            return Written("arriving")
        if not (self._admission.may_try(now_s) and self._health.may_try(now_s)):
            return Written("full" if self._admission.is_failing else "failed", error="the disk is left alone for now")
        room = self.index.reserve(arrival, now_s)
        measures.EVICTED.inc(len(room.victims))
        if not room.is_granted:
            await self.removals.add(room.victims)
            return Written("no_room", room.victims)
        victims, is_durable = list(room.victims), False
        try:
            await self.removals.add(room.victims)
            # A file of this name that is about to be deleted must not be deleted after it was written anew.
            await self.removals.settle(key)
            await self._put(arrival, blob, victims)
            is_durable = True
        except CapacityError as error:
            return Written("full", tuple(victims), error.message)
        except (ThermoclineError, OSError) as error:
            self._failed(str(error))
            return Written("failed", tuple(victims), str(error))
        finally:
            if is_durable:
                self.index.add(key, self._clock_s())
            else:
                self.index.give_up(key)
            self._measure()
        return Written("stored", tuple(victims))

    async def read(self, key: ChunkKey, read: ReadChunk, buffer: memoryview) -> ChunkHeader | None:
        """Read the chunk into ``buffer``, opened and verified; None if it is not there.

        Raises IntegrityError when it is not what it should be (it is gone from the disk then), TransportError when the
        disk failed, ConfigError when there is no key for it.
        """
        if key not in self.index:
            return None
        self._check_readable()
        self.index.hold(key)
        started_s = self._clock_s()
        try:
            await self.pace.wait(self.index.nbytes_of(key))
            header = await self.directories.run(
                self.directories.of(key),
                lambda: read(self.backend, key, buffer, timeout_s=READ_TIMEOUT_S),
                is_urgent=True,
                timeout_s=READ_TIMEOUT_S,
                uses=(buffer,),
            )
        except IntegrityError as error:
            self._lost[key] = None
            self.quarantine(key, error)
            raise
        except TransportError as error:
            await self.unreadable(key, error)
            raise
        finally:
            self.index.release(key)
        if header is None:
            await self._vanished(key)
        else:
            measures.moved(self.name, "read", header.nbytes, self._clock_s() - started_s)
        self._read_worked()
        return header

    async def read_parts(self, where: str, nbytes: int, buffers: Buffers, read: ReadParts) -> None:
        """Let ``read`` read ``nbytes`` bytes, parts of chunks that the caller holds, all of the directory ``where``, by
        way of a buffer of ``buffers``.

        Raises TransportError when the disk failed, or the error that ``read`` returned; then that chunk is not there
        any more, and the caller tells of it, unless only its key is missing.
        """
        self._check_readable()
        await self.pace.wait(nbytes)
        async with buffers.buffer(is_urgent=True) as buffer:
            started_s = self._clock_s()
            try:
                failure = await self.directories.run(
                    where, lambda: read(buffer), is_urgent=True, timeout_s=READ_TIMEOUT_S, uses=(buffer,)
                )
            except BaseException:
                read.abandon()
                raise
        if failure is None:
            measures.moved(self.name, "read", nbytes, self._clock_s() - started_s)
            self._read_worked()
            return
        if isinstance(failure.error, IntegrityError):
            self.quarantine(failure.key, failure.error)
        elif isinstance(failure.error, TransportError):
            await self.unreadable(failure.key, failure.error)
        elif isinstance(failure.error, NotFound):
            await self._vanished(failure.key)
        raise failure.error

    async def replace(self, key: ChunkKey, blob: memoryview) -> bool:
        """Put ``blob`` in the place of a chunk of as many bytes; False if it is not there (any more).

        Raises CapacityError or TransportError, and the chunk is as it was, or replaced.
        """
        backend = self.backend
        if key not in self.index or not isinstance(backend, PartialReads):
            return False
        if not (self._admission.may_try(self._clock_s()) and self._health.may_try(self._clock_s())):
            raise TransportError("the disk is left alone for now")
        started_s = self._clock_s()
        try:
            is_replaced = await self._replace(backend, key, blob)
        except TransportError as error:
            self._failed(error.message)
            raise
        measures.moved(self.name, "write", blob.nbytes, self._clock_s() - started_s)
        self._worked()
        return is_replaced

    def take_lost(self) -> list[ChunkKey]:
        """Return what reads found to be bad or gone since the last call: the reader reports it to the scheduler."""
        lost, self._lost = list(self._lost), {}
        return lost

    @property
    def quarantined(self) -> int:
        """Chunks that turned out to be bad."""
        return sum(self.quarantined_by_reason.values())

    def quarantine(self, key: ChunkKey, error: IntegrityError) -> None:
        """Quarantine a bad chunk: it is not served again."""
        measures.BAD_CHUNKS.labels(self.name, error.code).inc()
        _log.warning("chunk_quarantined", chunk=key.path, code=error.code, reason=error.message)
        self.quarantined_by_reason[error.code] = self.quarantined_by_reason.get(error.code, 0) + 1
        if self.index.forget(key):
            self.removals.add_bad(key)
        self._measure()

    async def drop(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Delete these; returns those that were there. They are forgotten first, and deleted behind."""
        gone: list[ChunkKey] = []
        for start in range(0, len(keys), FORGOTTEN_AT_ONCE):
            gone += [key for key in keys[start : start + FORGOTTEN_AT_ONCE] if self.index.forget(key)]
            await asyncio.sleep(0)
        self._measure()
        await self.removals.add(gone)
        return gone

    async def own(self, namespace: str, quota: DiskQuota) -> tuple[ChunkKey, ...]:
        """Note the owner of a namespace in an order, and its quota here; return what had to go for that."""
        victims = self.index.own(namespace, quota.owner, quota.disk_bytes)
        if victims:
            measures.EVICTED.inc(len(victims))
            self._measure()
            await self.removals.add(victims)
        return victims

    def found(self, entries: Sequence[ChunkEntry]) -> None:
        """Add chunks that are on the disk, as a start or the return of a directory found."""
        now_s = self._clock_s()
        for entry in entries:
            if not self.index.found(entry, now_s):
                self.directories.note_undeleted(entry.key)
        self._measure()

    def returned(self, directory: str) -> None:
        """Everything in a directory that was away was found."""
        self.index.returned(directory)
        self._measure()

    async def delete_again(self) -> None:
        """Try once more to delete the files that could not be, some at a time."""
        await self.removals.add(self.directories.undeleted())

    async def shrink(self) -> tuple[ChunkKey, ...]:
        """Keep within the quota what a start found."""
        victims = self.index.shrink()
        measures.EVICTED.inc(len(victims))
        await self.removals.add(victims)
        self._measure()
        return victims

    async def _put(self, arrival: Arrival, blob: memoryview, victims: list[ChunkKey]) -> None:
        try:
            await self._put_once(arrival, blob)
        except CapacityError as error:
            # Somebody else fills the file system. Less is kept, once; if that is no help, nothing is kept for a while.
            async with self._full_turn:
                if not self._admission.may_try(self._clock_s()):
                    raise
                more = self.index.shrink(self.index.used - arrival.nbytes)
                victims += more
                measures.EVICTED.inc(len(more))
                await self.removals.add(more)
                await self.removals.drained()
                try:
                    await self._put_once(arrival, blob)
                except CapacityError:
                    measures.DISK_FULL.inc()
                    self._refused_nbytes = arrival.nbytes
                    if self._admission.failed(self._clock_s()):
                        _log.warning("disk_full", reason=error.message, used=self.index.nbytes, quota=self.index.quota)
                    raise
        self._worked()
        if self._admission.worked():
            _log.info("disk_has_room_again")

    async def _put_once(self, arrival: Arrival, blob: memoryview) -> None:
        started_s = self._clock_s()
        if not (await self._put_new(arrival, blob) or await self._put_over(arrival, blob)):
            raise TransportError(f"a file that is not chunk {arrival.key.path} has its name")
        measures.moved(self.name, "write", blob.nbytes, self._clock_s() - started_s)

    async def _put_over(self, arrival: Arrival, blob: memoryview) -> bool:
        """Set aside an unknown file with the name of a chunk: its content is unknown, too."""
        key, backend = arrival.key, self.backend
        try:
            if isinstance(backend, PartialReads) and await self._replace(backend, key, blob):
                self.directories.removed(key, is_gone=True)
                return True
        except Hung:
            raise  # It still reads the blob.
        except TransportError as error:
            _log.warning("chunk_not_replaced", chunk=key.path, reason=error.message)
        self.directories.disown(key)
        return await self._put_new(arrival, blob)

    async def _put_new(self, arrival: Arrival, blob: memoryview) -> bool:
        key = arrival.key
        return await self.directories.run(
            self.directories.next(arrival.place),
            lambda: self.backend.put(key, blob, stripe=arrival.place, timeout_s=OWN_SHARE * WRITE_TIMEOUT_S),
            is_urgent=False,
            timeout_s=WRITE_TIMEOUT_S,
            uses=(blob,),
        )

    async def _replace(self, backend: PartialReads, key: ChunkKey, blob: memoryview) -> bool:
        return await self.directories.run(
            self.directories.of(key),
            lambda: backend.replace(key, blob, timeout_s=OWN_SHARE * WRITE_TIMEOUT_S),
            is_urgent=False,
            timeout_s=WRITE_TIMEOUT_S,
            uses=(blob,),
        )

    def _check_readable(self) -> None:
        """Raise TransportError while the disk is left alone. Directories are left out one by one instead."""
        if self._directories is None and not self._health.may_try(self._clock_s()):
            raise TransportError("the disk failed lately and is left alone for now")

    def _read_worked(self) -> None:
        if self._directories is None:
            self._worked()

    async def unreadable(self, key: ChunkKey, error: TransportError) -> None:
        """Handle a failed read: the chunk's KV is not available, and perhaps that of its whole directory."""
        measures.TIER_FAILURES.labels(self.name).inc()
        self._lost[key] = None
        if self._directories is None:
            self.index.forget(key)
            self._failed(error.message)
        else:
            await self.directories.unreadable(key, error.message)
        self._measure()

    async def _vanished(self, key: ChunkKey) -> None:
        if await self.directories.vanished(key):
            self._lost[key] = None

    def _failed(self, reason: str) -> None:
        measures.TIER_FAILURES.labels(self.name).inc()
        self._reason = reason
        if self._health.failed(self._clock_s()):
            _log.warning("disk_failed", reason=reason)

    def _worked(self) -> None:
        if self._health.worked():
            _log.info("disk_works_again")

    def _measure(self) -> None:
        measures.DISK_BYTES.set(self.index.used)
        measures.DISK_CHUNKS.set(len(self.index))
        measures.REMOVALS.set(len(self.removals))
