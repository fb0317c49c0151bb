"""One fetch: reads ahead, and copies chunks into the host pool in order, until one is missing."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from services.storage.backends import REMOTE_WIDTH
from services.storage.chunk_gathering import scatter_chunk
from services.storage.chunk_source import ChunkSource, Lost, Unverified
from services.storage.core.fetch_check import FetchChunk
from services.storage.core.fetch_progress import FetchProgress
from services.storage.io_threads import IoThreads
from services.storage.promotions import Brought
from shared.errors import IntegrityError
from shared.memory import HostPoolView

READ_AHEAD = 32
"""Most chunks of one fetch that are read from the disk at once; never more than there are threads."""

FAR_AHEAD = REMOTE_WIDTH
"""Chunks of one fetch that are under way at once where the object store is asked: its requests hold no thread."""


Reading = asyncio.Task[Brought | Unverified | Lost]

Came = list[tuple[FetchChunk, Brought | Unverified]]


class FetchRun:
    """Brings ``chunks`` to ``host`` and counts them in ``progress``."""

    def __init__(
        self,
        chunks: list[FetchChunk],
        progress: FetchProgress,
        source: ChunkSource,
        threads: IoThreads,
        host: HostPoolView,
        *,
        key_id: str,
        left_s: Callable[[], float],
    ) -> None:
        """Prepare; ``left_s`` returns how much time is left."""
        self._chunks = chunks
        self._progress = progress
        self._source = source
        self._threads = threads
        self._host = host
        self._key_id = key_id
        self._left_s = left_s

    async def bring(self, report: Callable[[], Awaitable[None]]) -> str:
        """Bring the available chunks; ``report`` is called at intervals. Return "", or why it ended early.

        When it returns or is cancelled, nothing of it is under way.
        """
        ahead: deque[tuple[FetchChunk, Reading]] = deque()
        waiting = deque(self._chunks)
        try:
            while waiting or ahead:
                while waiting and len(ahead) < self._most_ahead(waiting[0]):
                    chunk = waiting.popleft()
                    ahead.append((chunk, asyncio.create_task(self._read(chunk))))
                chunk, reading = ahead[0]
                # Shielded: reads of a cancelled fetch are ended, and waited for, in one place below.
                result = await asyncio.shield(reading)
                if isinstance(result, Lost):
                    ahead.popleft()
                    self._note(chunk, result)
                    return result.error
                came = _arrived(ahead, self._progress.until_report)
                is_worth_telling, bad = await self._put(came)
                if bad is not None:
                    self._note(*bad)
                    return bad[1].error
                if is_worth_telling:
                    await report()
        finally:
            await self._end(ahead)
        return ""

    def _most_ahead(self, chunk: FetchChunk) -> int:
        """Return how many chunks may be under way when this one begins, itself included."""
        return min(READ_AHEAD, self._threads.shares.depth) if self._source.is_near(chunk.key) else FAR_AHEAD

    def _read(self, chunk: FetchChunk) -> Coroutine[Any, Any, Brought | Unverified | Lost]:
        return self._source.read(chunk.key, chunk.place, self._key_id, self._left_s)

    async def _put(self, came: Came) -> tuple[bool, tuple[FetchChunk, Lost] | None]:
        """Put chunks into the host pool, in order, up to the first bad one.

        Return whether to report now, and the bad one, if any.
        """
        put: list[Brought] = []
        bad: tuple[FetchChunk, Lost] | None = None
        try:
            put, error = await self._threads.run(True, _scatter, came, self._host)
            if error is not None:
                chunk, found = came[len(put)]
                assert isinstance(found, Unverified)
                bad = chunk, found.lost(error)
        finally:
            for brought in put:
                self._source.finish(brought, is_promoted=brought.source == "remote")
            for _, left in came[len(put) :]:
                self._source.finish(left, is_promoted=False)
        told = [self._progress.arrived(brought.source, brought.nbytes) for brought in put]
        return any(told), bad

    async def _end(self, ahead: deque[tuple[FetchChunk, Reading]]) -> None:
        for _, reading in ahead:
            reading.cancel()
        for chunk, reading in ahead:
            await asyncio.wait({reading})
            if reading.cancelled() or reading.exception() is not None:
                continue
            result = reading.result()
            if isinstance(result, Lost):
                self._note(chunk, result)
            else:
                self._source.finish(result, is_promoted=False)

    def _note(self, chunk: FetchChunk, lost: Lost) -> None:
        if lost.is_missing:
            self._progress.missing.append(chunk.key)


def _arrived(ahead: deque[tuple[FetchChunk, Reading]], most: int) -> Came:
    """Take the arrived ones of the next ``most`` chunks; the first has arrived. One call of a thread puts them all."""
    arrived: Came = []
    while ahead and len(arrived) < most:
        chunk, reading = ahead[0]
        if not reading.done() or reading.cancelled() or reading.exception() is not None:
            break
        result = reading.result()
        if isinstance(result, Lost):
            break
        ahead.popleft()
        arrived.append((chunk, result))
    return arrived


def _scatter(came: Came, host: HostPoolView) -> tuple[list[Brought], IntegrityError | None]:
    """Verify chunks that are not verified yet, and copy them to the host pool.

    Return those, and the error that ended it early.
    """
    put: list[Brought] = []
    for chunk, found in came:
        if isinstance(found, Unverified):
            try:
                put.append(found.put(chunk, host))
            except IntegrityError as error:
                return put, error
        else:
            scatter_chunk(chunk, found.blob, found.checksums, host)
            put.append(found)
    return put, None
