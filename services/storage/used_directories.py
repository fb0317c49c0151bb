"""The directories of the disk as the tier uses them: each in threads of its own, and only while it can be used.

A chunk that cannot be read is given up, and its file deleted. A directory in which nothing can be read, or that does
not answer in time, is left out until ``tier_watch`` finds that it can be used; the others serve on. Files that could
not be deleted count until they are gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from itertools import islice
from typing import Any, TypeVar

from services.storage.abandoned import Abandoned
from services.storage.backends import ChunkKey, Directories
from services.storage.backends.file_calls import LacksMeans
from services.storage.core.chunk_index import ChunkIndex
from services.storage.io_threads import Hung, IoThreads
from shared import logs
from shared.errors import ThermoclineError, TransportError

JUDGE_S = 10.0
CHECK_S = 30.0
DELETE_S = 30.0
"""Longest time for deleting some files at once."""

OWN_SHARE = 0.9
"""Part of its time after which a call begins no further step by itself.

So a call that is only slow ends before it counts as one that hangs.
"""

UNDELETED_AT_ONCE = 1024
"""Files that could not be deleted and are tried again in one round, one at a time."""

_log = logs.get_logger("storage")

R = TypeVar("R")


class UsedDirectories:
    """Calls in directories, by their paths; "" is none. Owned by the event loop."""

    def __init__(self, backend: Directories, index: ChunkIndex, common: IoThreads) -> None:
        """Give each directory of ``backend`` threads of its own, which share the depth of ``common``.

        Calls in none use ``common`` itself, which is closed by its owner. ``index`` is told of chunks that leave with
        their directory, or are lost.
        """
        self.has_left = asyncio.Event()
        """Set when a directory was left out: its chunks wait in :meth:`take_left`."""
        self._backend = backend
        self._index = index
        count = len(backend.paths()) + len(backend.left_out)
        self.abandoned = Abandoned()
        self._common = common
        self._depth = -(-common.shares.depth // max(1, count))
        self._threads: dict[str, IoThreads] = {}  # Those of each directory, so that one that hangs holds no others.
        # Held while a directory leaves: until the index knows, a chunk that is away must not be taken for one that is
        # gone. Nothing is waited for meanwhile that may hang.
        self._settling = asyncio.Lock()
        self._errands: set[asyncio.Task[None]] = set()
        self._judging: dict[str, asyncio.Lock] = {}  # By directory: the first failed read may answer for the others.
        self._undeleted: dict[ChunkKey, None] = {}
        self._left: list[ChunkKey] = []

    def of(self, key: ChunkKey) -> str:
        """Return the directory that a chunk is in."""
        return self._backend.place_of(key)[0]

    def next(self, stripe: int) -> str:
        """Return the directory for a chunk of this ``stripe``."""
        return self._backend.turn_of(stripe)

    async def run(
        self,
        where: str,
        function: Callable[[], R],
        *,
        is_urgent: bool,
        timeout_s: float | None,
        uses: Sequence[memoryview] = (),
    ) -> R:
        """Call ``function`` in a thread of the directory ``where`` ("" is none), when it is its turn.

        Cut off, or after ``timeout_s``, the call goes on by itself: ``uses`` are buffers that it writes or reads until
        then. A directory that does not answer in time is left out. Raises what ``function`` raises,
        :class:`~services.storage.io_threads.Hung` where it took too long, and TransportError for a directory that was
        left out before its turn came.
        """
        threads = self._threads_of(where)

        def leave(hung: Hung) -> asyncio.Task[None]:
            return self._go_on(self._leave(where, threads, f"directory {where}: {hung.message}"))

        try:
            return await threads.attempt(
                function, self.abandoned, is_urgent=is_urgent, timeout_s=timeout_s, uses=uses, on_hung=leave
            )
        except Hung as error:
            await asyncio.shield(leave(error))
            raise

    async def unreadable(self, key: ChunkKey, reason: str) -> None:
        """Find out whether an unreadable chunk or its whole directory is bad, and stop using that."""
        await asyncio.shield(self._go_on(self._judge(key, reason)))

    async def check(self, where: str) -> None:
        """Leave out a directory that is not the one that was opened. Raises TransportError then, and if it hangs."""
        threads = self._threads_of(where)
        try:
            await self.run(where, lambda: self._backend.check(where), is_urgent=True, timeout_s=CHECK_S)
        except LacksMeans:
            raise
        except TransportError as error:
            await asyncio.shield(self._go_on(self._leave(where, threads, error.message)))
            raise

    async def vanished(self, key: ChunkKey) -> bool:
        """Forget a chunk that was not found; return False if it was not there, or is away with its directory."""
        async with self._settling:
            return self._index.forget(key)

    def take_left(self) -> list[ChunkKey]:
        """Return chunks of directories left out since the last call, to be reported to the scheduler."""
        left, self._left = self._left, []
        self.has_left.clear()
        return left

    async def delete(self, batch: dict[ChunkKey, bool]) -> dict[ChunkKey, str]:
        """Delete these files, or quarantine those of bad chunks.

        Return those that could not be deleted, with the reason. All directories at once, so that none waits for
        another.
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
        """Note the result of a deletion or replacement: a file is gone with its chunk, or its bytes still count."""
        if is_gone:
            if key in self._undeleted:
                del self._undeleted[key]
                self._index.cleared(key)
            return
        where, nbytes = self._backend.place_of(key)
        self.note_undeleted(key)
        self._index.leave_over(key, nbytes, where)

    def disown(self, key: ChunkKey) -> None:
        """Leave an old file of a chunk to be written in place, if it can be neither replaced nor deleted."""
        where, nbytes = self._backend.place_of(key)
        self._backend.disown(key)
        self._undeleted.pop(key, None)
        self._index.leave_over(key, nbytes, where)

    def note_undeleted(self, key: ChunkKey) -> None:
        """Note the remaining file of a chunk that is gone, behind the others, which are tried before it."""
        self._undeleted.pop(key, None)
        self._undeleted[key] = None

    def undeleted(self) -> Iterable[ChunkKey]:
        """Return some of the chunks whose files should be deleted again."""
        return list(islice(self._undeleted, UNDELETED_AT_ONCE))

    def close(self) -> None:
        """Start no more calls; those under way end by themselves."""
        for threads in self._threads.values():
            threads.close()

    def _threads_of(self, where: str) -> IoThreads:
        if not where:
            return self._common
        return self._threads.get(where) or self._threads.setdefault(where, IoThreads(self._depth))

    async def _delete(self, where: str, batch: dict[ChunkKey, bool]) -> dict[ChunkKey, str]:
        try:
            return await self.run(where, lambda: _delete_all(self._backend, batch), is_urgent=False, timeout_s=DELETE_S)
        except TransportError as error:
            return dict.fromkeys(batch, error.message)

    async def _judge(self, key: ChunkKey, reason: str) -> None:
        where = self.of(key)
        threads = self._threads_of(where)
        async with self._judging.setdefault(where, asyncio.Lock()):
            if key not in self._index or self.of(key) != where:
                return
            judging = IoThreads(1)  # Those of the directory may all hang.
            try:
                judged = await judging.attempt(
                    lambda: self._backend.unreadable(key, timeout_s=OWN_SHARE * JUDGE_S),
                    self.abandoned,
                    is_urgent=True,
                    timeout_s=JUDGE_S,
                )
            except Hung as error:
                await self._leave(where, threads, f"directory {where}: {error.message}")
                return
            except TransportError:
                return  # The tier is closed.
            finally:
                judging.close()
            if judged.is_directory_bad:
                await self._leave(where, threads, reason)
            elif await self.vanished(key):
                _log.warning("chunk_unreadable", chunk=key.path, reason=reason)
                self._index.leave_over(key, judged.left_bytes, where)

    def _go_on(self, errand: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin what has to be done to its end, though its caller may be cut off."""
        task = asyncio.create_task(errand)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)
        return task

    async def _leave(self, where: str, threads: IoThreads, reason: str) -> None:
        """Leave out a directory whose calls ``threads`` run, unless that was done already."""
        async with self._settling:
            if self._threads.get(where) is not threads:
                return
            keys = await asyncio.to_thread(self._backend.leave, where, reason)
            self._left += self._index.leave(keys, where)
            del self._threads[where]
            threads.give_up(reason)  # Those that wait for it fail; it gets new threads when it is back.
            self.has_left.set()


def _delete_all(backend: Directories, batch: dict[ChunkKey, bool]) -> dict[ChunkKey, str]:
    deadline_s = time.monotonic() + OWN_SHARE * DELETE_S
    failed: dict[ChunkKey, str] = {}
    for key, is_bad in batch.items():
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            failed[key] = "the disk took too long"
            continue
        try:
            (backend.quarantine if is_bad else backend.delete)(key, timeout_s=left_s)
        except (ThermoclineError, OSError) as error:
            failed[key] = str(error)
    return failed
