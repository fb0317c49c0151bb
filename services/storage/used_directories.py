"""The directories of the disk as the tier uses them: each in threads of its own, and only while it can be used.

A chunk that cannot be read is done without, and its file goes. A directory in which nothing can be read, or that does
not answer in time, is left out until ``tier_watch`` finds that it can be used; the others serve on. Files that could
not be deleted count until they are gone. A tier that has no directories uses the threads that are common to all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Protocol, TypeVar, runtime_checkable

from services.storage.backends import ChunkBackend, ChunkKey, Directories
from services.storage.core.chunk_index import ChunkIndex
from services.storage.disk_threads import DiskThreads
from services.storage.io_threads import Hung, IoThreads
from shared import logs
from shared.errors import ThermoclineError, TransportError

JUDGE_S = 10.0
DELETE_S = 30.0
"""For some files at once."""

OWN_SHARE = 0.9
"""Part of its time after which a call begins nothing more by itself: one that is only slow ends before it counts as one
that hangs.
"""

UNDELETED_AT_ONCE = 1024
"""Files that could not be deleted; each is tried again, one at a time."""

_log = logs.get_logger("storage")

R = TypeVar("R")


@runtime_checkable
class Quarantining(Protocol):
    """A backend that keeps a few bad blobs for an operator to look at instead of deleting them."""

    def quarantine(self, key: ChunkKey, *, timeout_s: float) -> bool:
        """Drop a blob that failed verification. False if the tier lacked it."""


class UsedDirectories:
    """Owned by the event loop. Directories are called by their paths, "" is none."""

    def __init__(self, backend: ChunkBackend, index: ChunkIndex, common: IoThreads) -> None:
        self.has_left = asyncio.Event()
        """One was left out: somebody should call :meth:`take_left`."""
        self._backend = backend
        self._directories = backend if isinstance(backend, Directories) else None
        self._index = index
        count = len(self._directories.paths()) + len(self._directories.left_out) if self._directories else 0
        self._threads = DiskThreads(common, count)
        self.abandoned = self._threads.abandoned
        # What a failed read means, one after the other: between a directory's leaving and the index's knowing of it
        # what is away must not be taken for what is gone.
        self._settling = asyncio.Lock()
        self._undeleted: dict[ChunkKey, None] = {}
        self._left: list[ChunkKey] = []

    def of(self, key: ChunkKey) -> str:
        """Return the directory that a chunk is in."""
        return self._directories.place_of(key)[0] if self._directories is not None else ""

    def next(self, stripe: int) -> str:
        """Return the directory for a chunk of this ``stripe``."""
        return self._directories.turn_of(stripe) if self._directories is not None else ""

    async def run(
        self,
        where: str,
        function: Callable[[], R],
        *,
        is_urgent: bool,
        timeout_s: float | None,
        uses: Sequence[memoryview] = (),
    ) -> R:
        """Call ``function`` in a thread of the directory ``where``. One that does not answer in time is left out.

        Raises what ``function`` raises, and as ``DiskThreads.run`` does.
        """
        try:
            return await self._threads.run(where, function, is_urgent=is_urgent, timeout_s=timeout_s, uses=uses)
        except Hung as error:
            async with self._settling:
                await self._leave(where, error.message)
            raise

    async def unreadable(self, key: ChunkKey, reason: str) -> None:
        """Find out whether an unreadable chunk alone is bad, and do without what is."""
        directories = self._directories
        async with self._settling:
            if key not in self._index or directories is None:
                return
            where = self.of(key)
            try:
                judged = await self._threads.run(
                    where,
                    lambda: directories.unreadable(key, reason, timeout_s=OWN_SHARE * JUDGE_S),
                    is_urgent=True,
                    timeout_s=JUDGE_S,
                )
            except Hung as error:
                await self._leave(where, error.message)
                return
            except TransportError:
                return  # The tier is closed.
            if judged.directory:
                self._note_left(judged.keys, judged.directory, reason)
            elif self._index.forget(key):
                _log.warning("chunk_unreadable", chunk=key.path, reason=reason)
                self._index.leave_over(key, judged.left_bytes, where)

    async def vanished(self, key: ChunkKey) -> bool:
        """Forget a chunk that was not found. False if it was not there, or is away with its directory."""
        async with self._settling:
            return self._index.forget(key)

    def take_left(self) -> list[ChunkKey]:
        """Return what lay in directories that were left out since the last call, to be reported to the scheduler."""
        left, self._left = self._left, []
        self.has_left.clear()
        return left

    async def delete(self, batch: dict[ChunkKey, bool]) -> dict[ChunkKey, str]:
        """Delete these files, or quarantine those of chunks that are bad; what could not be deleted, and why.

        All directories at once, so that none waits for another.
        """
        by_directory: dict[str, dict[ChunkKey, bool]] = {}
        for key, is_bad in batch.items():
            by_directory.setdefault(self.of(key), {})[key] = is_bad
        results = await asyncio.gather(*(self._delete(where, some) for where, some in by_directory.items()))
        failed = {key: reason for result in results for key, reason in result.items()}
        for key in batch:
            self.removed(key, is_gone=key not in failed)
        return failed

    def removed(self, key: ChunkKey, *, is_gone: bool) -> None:
        """Note a file that was to be deleted, or replaced: it is gone with its chunk, or its bytes count."""
        if is_gone or self._directories is None:
            if key in self._undeleted:
                del self._undeleted[key]
                self._index.cleared(key)
            return
        where, nbytes = self._directories.place_of(key)
        self.note_undeleted(key)
        self._index.leave_over(key, nbytes, where)

    def disown(self, key: ChunkKey) -> None:
        """Leave a file of a chunk that is to be written where it is, if it can neither be replaced nor deleted."""
        if self._directories is not None:
            where, nbytes = self._directories.place_of(key)
            self._directories.disown(key)
            self._undeleted.pop(key, None)
            self._index.leave_over(key, nbytes, where)

    def note_undeleted(self, key: ChunkKey) -> None:
        """There is a file of a chunk that has gone."""
        self._undeleted[key] = None

    def undeleted(self) -> Iterable[ChunkKey]:
        """Return some of those that should be deleted once more."""
        return list(islice(self._undeleted, UNDELETED_AT_ONCE))

    def close(self) -> None:
        """Start no more calls; those under way end by themselves."""
        self._threads.close()

    async def _delete(self, where: str, batch: dict[ChunkKey, bool]) -> dict[ChunkKey, str]:
        try:
            return await self.run(where, lambda: _delete_all(self._backend, batch), is_urgent=False, timeout_s=DELETE_S)
        except TransportError as error:
            return dict.fromkeys(batch, error.message)

    async def _leave(self, where: str, reason: str) -> None:
        if self._directories is not None and where in self._directories.paths():
            keys = await asyncio.to_thread(self._directories.leave, where, f"directory {where}: {reason}")
            self._note_left(keys, where, reason)

    def _note_left(self, keys: Sequence[ChunkKey], where: str, reason: str) -> None:
        self._left += self._index.leave(keys, where)
        self._threads.left(where, reason)
        self.has_left.set()


def _delete_all(backend: ChunkBackend, batch: dict[ChunkKey, bool]) -> dict[ChunkKey, str]:
    set_aside = backend.quarantine if isinstance(backend, Quarantining) else backend.delete
    deadline_s = time.monotonic() + OWN_SHARE * DELETE_S
    failed: dict[ChunkKey, str] = {}
    for key, is_bad in batch.items():
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            failed[key] = "the disk took too long"
            continue
        try:
            (set_aside if is_bad else backend.delete)(key, timeout_s=left_s)
        except (ThermoclineError, OSError) as error:
            failed[key] = str(error)
    return failed
