"""Turns for the buffers of chunks: fetches first, and saves never hold all of them.

``staging.Staging`` owns the memory; this is the queue in front of it, on the event loop, so that no thread ever waits
for a buffer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.storage import measures
from services.storage.abandoned import Abandoned
from services.storage.staging import Staging


class Buffers:
    """Turns for the buffers of one :class:`Staging`, used by no other. Owned by the event loop."""

    def __init__(self, staging: Staging, abandoned: Abandoned | None = None) -> None:
        """Share ``staging``; buffers that ``abandoned`` calls still use are given back when they end."""
        self._staging = staging
        self._abandoned = Abandoned() if abandoned is None else abandoned
        self._waiting: dict[bool, deque[asyncio.Future[memoryview]]] = {True: deque(), False: deque()}
        self._taken = {True: 0, False: 0}
        # Background work leaves at least one buffer to fetches, where there are two.
        self.background_most = max(1, staging.buffers // 2)

    @property
    def blob_bytes(self) -> int:
        """Bytes of each buffer: one blob of the geometry."""
        return self._staging.blob_bytes

    @property
    def taken(self) -> int:
        """Buffers in use, by fetches and by background work together."""
        return self._taken[True] + self._taken[False]

    @asynccontextmanager
    async def buffer(self, *, is_urgent: bool) -> AsyncIterator[memoryview]:
        """Wait for a buffer of ``blob_bytes`` bytes; it is given back at the end of the block. Fetches are urgent."""
        buffer = await self.take(is_urgent=is_urgent)
        try:
            yield buffer
        finally:
            self.give_back(buffer, is_urgent=is_urgent)

    async def take(self, *, is_urgent: bool) -> memoryview:
        """Wait for a buffer, to be given back by :meth:`give_back`."""
        turn: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()
        self._waiting[is_urgent].append(turn)
        self._serve()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(turn.result(), is_urgent=is_urgent)
            raise

    def give_back(self, buffer: memoryview, *, is_urgent: bool) -> None:
        """End the use of a buffer that :meth:`take` returned."""
        self._abandoned.when_free(buffer, lambda: self._given_back(buffer, is_urgent))

    def _given_back(self, buffer: memoryview, is_urgent: bool) -> None:
        self._staging.give_back(buffer)
        self._taken[is_urgent] -= 1
        measures.STAGING_TAKEN.dec()
        self._serve()

    def close(self) -> None:
        """Release the memory. Waiting callers are cancelled."""
        for waiting in self._waiting.values():
            for turn in waiting:
                turn.cancel()
        self._staging.close()

    def _serve(self) -> None:
        for is_urgent in (True, False):
            waiting = self._waiting[is_urgent]
            while waiting and self.taken < self._staging.buffers:
                if waiting[0].done():  # Its waiter was cancelled.
                    waiting.popleft()
                    continue
                if not is_urgent and self._taken[False] >= self.background_most:
                    break
                waiting.popleft().set_result(self._staging.take())
                self._taken[is_urgent] += 1
                measures.STAGING_TAKEN.inc()
