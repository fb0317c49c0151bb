"""The gate at which writes of host pages wait for earlier ordered reads of them (``core/page_hazards.py``).

The wait is bounded. A save whose page was overwritten all the same finds that out by identity and checksum, and does
not save it: waiting preserves chunks, correctness does not depend on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from services.storage import measures
from services.storage.core.page_hazards import PageHazards

WAIT_S = 2.0
"""Longest wait of a backup; past it the pages to be saved are lost rather than let requests wait."""


class PageGate:
    """Waits of writes for reads. Owned by the event loop."""

    def __init__(self, *, wait_s: float = WAIT_S) -> None:
        """Bound the wait of a write for earlier reads to ``wait_s`` seconds; then it goes first."""
        self._hazards = PageHazards()
        self._wait_s = wait_s
        self._changed: asyncio.Event = asyncio.Event()

    def read_ordered(self, pages: Iterable[int]) -> int:
        """Note an ordered read of host pages; return its ticket."""
        return self._hazards.begin(pages)

    def read_over(self, ticket: int) -> None:
        """End that read, done or given up; idempotent."""
        if self._hazards.finish(ticket):
            self._changed.set()
            self._changed = asyncio.Event()

    def write_ordered(self, pages: Iterable[int]) -> tuple[int, ...]:
        """Return the reads that a write ordered now must wait for; to be given to :meth:`passed`."""
        return self._hazards.before(pages)

    async def passed(self, reads: tuple[int, ...]) -> bool:
        """Wait until these reads are over; return False if that took too long and the write goes first."""
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
