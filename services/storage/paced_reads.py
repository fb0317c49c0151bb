"""A limit on the rate of reads of the disk (setting ``disk_read_bytes_per_s``), in order of arrival.

A limit keeps fetches from taking up a disk that others use, and gives measurements a disk of a known speed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from services.storage import measures
from services.storage.core.read_budget import ReadBudget


class PacedReads:
    """The limit on all reads of one disk. Owned by the event loop."""

    def __init__(
        self,
        bytes_per_s: float,
        *,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Prepare; ``bytes_per_s`` 0 is no limit."""
        self._budget = ReadBudget(bytes_per_s) if bytes_per_s > 0 else None
        self._clock_s = clock_s
        self._sleep = sleep
        self._turn = asyncio.Lock()  # Wakes waiting callers in order of arrival.
        self.nbytes = 0
        """Bytes granted since the start."""

    async def wait(self, nbytes: int) -> None:
        """Return when ``nbytes`` may be read.

        A caller that is cancelled meanwhile has taken nothing: the next one may read as early as if it had never asked,
        apart from the time that has passed.
        """
        if self._budget is None:
            self.nbytes += nbytes
            return
        started_s = self._clock_s()
        try:
            async with self._turn:
                due_s = self._budget.due_s(nbytes, self._clock_s())
                left_s = due_s - self._clock_s()
                if left_s > 0:
                    await self._sleep(left_s)
                self._budget.take(due_s)
                self.nbytes += nbytes
        finally:
            measures.PACED_SECONDS.inc(max(0.0, self._clock_s() - started_s))
