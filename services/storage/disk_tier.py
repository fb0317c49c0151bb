"""The disk tier: a backend, the index of its chunks, and the handling of a full or broken disk.

Decisions are the index's and the health's; this module puts them around blocking calls. The index is changed on the
event loop alone, so that all callers see one state: a chunk is there once its ``put`` returned, and is not there any
more the moment it is evicted, even before its file is deleted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from services.storage import measures
from services.storage.backends import ChunkEntry, ChunkKey, Directories
from services.storage.backends.file_calls import LacksMeans
from services.storage.buffers import Buffers
from services.storage.chunk_format import ChunkHeader
from services.storage.chunk_reading import VerifiedRead
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
"""Longest read; not the rest of a fetch's time, because a disk slower than that has not failed."""

WRITE_TIMEOUT_S = 30.0

FORGOTTEN_AT_ONCE = 4096
"""Chunks of a large drop that are forgotten before the event loop serves others."""

_log = logs.get_logger("storage")

Outcome = Literal["stored", "there", "arriving", "no_room", "full", "failed"]


@dataclass(frozen=True, slots=True)
class Written:
    """Result of a write. ``victims`` were evicted for it, whatever its outcome."""

    outcome: Outcome
    victims: tuple[ChunkKey, ...] = ()
    error: str = ""


class ReadParts(Protocol):
    """Reads parts of chunks by way of a buffer, in a thread, until one fails."""

    def __call__(self, buffer: memoryview) -> PartFailure | None:
        """Read them; return the failure that ended it, or None. Blocking."""

    def abandon(self) -> None:
        """Make the read write only to its buffer from now on."""


class DiskTier:
    """The chunks on the disk. Owned by the event loop."""

    name = "disk"

    def __init__(
        self,
        backend: Directories,
        quota: int,
        threads: IoThreads,
        *,
        pace: PacedReads | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare; reads keep to ``pace``, None is no limit."""
        self.index = ChunkIndex(quota)
        self.directories = UsedDirectories(backend, self.index, threads)
        self.removals = Removals(self.directories.delete)
        self.quarantined_by_reason: dict[str, int] = {}
        self._reason = ""  # Reason of the last failure.
        self._full_reason = ""  # Why the last chunk did not fit.
        self._refused_nbytes = 0  # Size of the chunk that did not fit.
        self._lost: dict[ChunkKey, None] = {}  # Chunks lost by reading; see :meth:`take_lost`.
        self.backend = backend
        self.pace = pace or PacedReads(0)
        self._clock_s = clock_s
        self._health = TierHealth(first_s=1.0, most_s=30.0)
        self._admission = TierHealth(first_s=5.0, most_s=60.0)
        self._full_turn = asyncio.Lock()
        measures.DISK_QUOTA.set(quota)

    def __contains__(self, key: ChunkKey) -> bool:
        """Return whether a chunk is on the disk, neither in flight to it nor in a directory that is away."""
        return key in self.index

    def now_s(self) -> float:
        """Return the clock of the index, in seconds."""
        return self._clock_s()

    @property
    def fault(self) -> str:
        """Why the disk is left alone, or was until its next try; "" while it works."""
        return self._reason if self._health.is_failing else ""

    @property
    def full(self) -> str:
        """Why new chunks, within the quota, are refused for want of room on the file system; "" while they are not."""
        return self._full_reason if self._admission.is_failing else ""

    def has_room(self, free_bytes: int) -> None:
        """Note the free space of the file system: chunks that fit now are kept again. Called without writes, too."""
        is_due = self._admission.is_failing and self._admission.may_try(self._clock_s())
        if is_due and free_bytes >= self._refused_nbytes and self._admission.worked():
            _log.info("disk_has_room_again")

    def may_try(self) -> bool:
        """Return whether the disk may be used now."""
        return self._health.may_try(self._clock_s())

    def works(self) -> None:
        """Note that a use of the disk succeeded."""
        if self._health.worked():
            _log.info("disk_works_again")

    async def write(self, arrival: Arrival, blob: memoryview) -> Written:
        """Keep a chunk, if it is worth it and the disk takes it. Errors of the disk are returned, never raised."""
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
            # A pending deletion of a file of this name must not hit the new file.
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
                if self.backend.place_of(key)[1]:  # A file of its name is left, which no deletion is queued for.
                    self.directories.removed(key, is_gone=False)
            self._measure()
        return Written("stored", tuple(victims))

    async def read(self, key: ChunkKey, read: VerifiedRead, buffer: memoryview) -> ChunkHeader | None:
        """Read the chunk into ``buffer``, opened and verified; return None if it is not there.

        Raises IntegrityError when it is damaged or another chunk (it is then removed from the disk), TransportError
        when the disk failed, ConfigError when there is no key for it.
        """
        if key not in self.index:
            return None
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
        return header

    async def read_parts(self, where: str, nbytes: int, buffers: Buffers, read: ReadParts) -> None:
        """Let ``read`` read ``nbytes`` bytes, parts of chunks that the caller holds, by way of a buffer of ``buffers``.

        All are in the directory ``where``. Raises TransportError when the disk failed, or the error that ``read``
        returned; then that chunk is not there any more, and the caller reports it, unless only its key is missing.
        """
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
            return
        if isinstance(failure.error, IntegrityError):
            self.quarantine(failure.key, failure.error)
        elif isinstance(failure.error, TransportError):
            await self.unreadable(failure.key, failure.error)
        elif isinstance(failure.error, NotFound):
            await self._vanished(failure.key)
        raise failure.error

    def take_lost(self) -> list[ChunkKey]:
        """Return chunks that reads found bad or gone since the last call: the reader reports them to the scheduler."""
        lost, self._lost = list(self._lost), {}
        return lost

    @property
    def quarantined(self) -> int:
        """Number of chunks that turned out to be bad."""
        return sum(self.quarantined_by_reason.values())

    def quarantine(self, key: ChunkKey, error: IntegrityError) -> None:
        """Quarantine a bad chunk, which is not served again."""
        measures.BAD_CHUNKS.labels(self.name, error.code).inc()
        _log.warning("chunk_quarantined", chunk=key.path, code=error.code, reason=error.message)
        self.quarantined_by_reason[error.code] = self.quarantined_by_reason.get(error.code, 0) + 1
        if self.index.forget(key):
            self.removals.add_bad(key)
        self._measure()

    async def drop(self, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """Delete these chunks; return those that were there. They are forgotten at once, and deleted later."""
        gone: list[ChunkKey] = []
        for start in range(0, len(keys), FORGOTTEN_AT_ONCE):
            gone += [key for key in keys[start : start + FORGOTTEN_AT_ONCE] if self.index.forget(key)]
            await asyncio.sleep(0)
        self._measure()
        await self.removals.add(gone)
        return gone

    async def own(self, namespace: str, quota: DiskQuota) -> tuple[ChunkKey, ...]:
        """Note the owner of a namespace in an order, and its quota here; return the chunks evicted for that."""
        victims = self.index.own(namespace, quota.owner, quota.disk_bytes)
        if victims:
            measures.EVICTED.inc(len(victims))
            self._measure()
            await self.removals.add(victims)
        return victims

    def found(self, entries: Sequence[ChunkEntry]) -> None:
        """Add chunks that are on the disk, found at a start or at the return of a directory."""
        now_s = self._clock_s()
        for entry in entries:
            if not self.index.found(entry, now_s):
                self.directories.note_undeleted(entry.key)
        self._measure()

    def returned(self, directory: str) -> None:
        """End the search of a directory that was away: all its chunks were found."""
        self.index.returned(directory)
        self._measure()

    async def delete_again(self) -> None:
        """Try again to delete files that could not be deleted, some at a time."""
        await self.removals.add(self.directories.undeleted())

    async def shrink(self) -> tuple[ChunkKey, ...]:
        """Evict chunks found at a start that exceed the quota."""
        victims = self.index.shrink()
        measures.EVICTED.inc(len(victims))
        await self.removals.add(victims)
        self._measure()
        return victims

    async def _put(self, arrival: Arrival, blob: memoryview, victims: list[ChunkKey]) -> None:
        try:
            await self._put_once(arrival, blob)
        except CapacityError as error:
            # Other data fills the file system. Shrink once; if that is no help, keep nothing new for a while.
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
                    self._full_reason, self._refused_nbytes = error.message, arrival.nbytes
                    if self._admission.failed(self._clock_s()):
                        _log.warning("disk_full", reason=error.message, used=self.index.nbytes, quota=self.index.quota)
                    raise
        self.works()
        if self._admission.worked():
            _log.info("disk_has_room_again")

    async def _put_once(self, arrival: Arrival, blob: memoryview) -> None:
        started_s = self._clock_s()
        if not (await self._put_new(arrival, blob) or await self._put_over(arrival, blob)):
            raise TransportError(f"a file that is not chunk {arrival.key.path} has its name")
        measures.moved(self.name, "write", blob.nbytes, self._clock_s() - started_s)

    async def _put_over(self, arrival: Arrival, blob: memoryview) -> bool:
        """Replace an unknown file with the name of a chunk: its content cannot be trusted."""
        key = arrival.key
        try:
            if await self._replace(key, blob):
                self.directories.removed(key, is_gone=True)
                return True
        except Hung:
            raise  # The abandoned call still reads the blob.
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

    async def _replace(self, key: ChunkKey, blob: memoryview) -> bool:
        return await self.directories.run(
            self.directories.of(key),
            lambda: self.backend.replace(key, blob, timeout_s=OWN_SHARE * WRITE_TIMEOUT_S),
            is_urgent=False,
            timeout_s=WRITE_TIMEOUT_S,
            uses=(blob,),
        )

    async def unreadable(self, key: ChunkKey, error: TransportError) -> None:
        """Handle a failed read: the chunk is not available, and perhaps no chunk of its directory.

        A read that this process or machine lacked the means for is only counted.
        """
        measures.TIER_FAILURES.labels(self.name).inc()
        if isinstance(error, LacksMeans):
            return
        self._lost[key] = None
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

    def _measure(self) -> None:
        measures.DISK_BYTES.set(self.index.used)
        measures.DISK_CHUNKS.set(len(self.index))
        measures.REMOVALS.set(len(self.removals))
