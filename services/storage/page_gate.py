"""Where those who write host pages wait for those who were ordered to read them first (``core/page_hazards.py``).

The wait is bounded. A save whose page was overwritten all the same finds that out by identity and checksum, and saves
nothing of it: waiting is for the sake of what is saved, never of what is right.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from services.storage import measures
from services.storage.core.page_hazards import PageHazards

WAIT_S = 2.0
"""A backup that waits longer would let requests wait; then what was to be saved is lost instead."""


class PageGate:
    """Owned by the event loop."""

    def __init__(self, *, wait_s: float = WAIT_S) -> None:
        self._hazards = PageHazards()
        self._wait_s = wait_s
        self._changed: asyncio.Event = asyncio.Event()

    def read_ordered(self, pages: Iterable[int]) -> int:
        """Note an ordered read of host pages; returns its ticket."""
        return self._hazards.begin(pages)

    def read_over(self, ticket: int) -> None:
        """End that read, done or given up; idempotent."""
        if self._hazards.finish(ticket):
            self._changed.set()
            self._changed = asyncio.Event()

    def write_ordered(self, pages: Iterable[int]) -> tuple[int, ...]:
        """Return the reads that a write which is ordered now comes after; to be given to :meth:`passed`."""
        return self._hazards.before(pages)

    async def passed(self, reads: tuple[int, ...]) -> bool:
        """Wait until these reads are over; False if that took too long and the write goes first."""
        if self._hazards.is_clear(reads):
            return True
        try:
            async with asyncio.timeout(self._wait_s):
                while not self._hazards.is_clear(reads):
                    await self._changed.wait()
        except TimeoutError:
            measures.OVERTAKEN.inc()
            return False
        return True
