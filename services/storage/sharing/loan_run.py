"""One fetch from another node's host memory: a few reads at once, each of several chunks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from services.storage.core.fetch_progress import FetchProgress
from services.storage.sharing.lenders import Lenders
from services.storage.sharing.loan_groups import LentGroup
from shared.memory import HostPoolView
from shared.messages.storage_plans import Lender

READS_AHEAD = 4
"""Reads of one fetch at once: one in flight, one that is verified, and one at either end."""


class LoanRun:
    """Brings chunks of one lender to ``host`` and counts them in ``progress``."""

    def __init__(
        self,
        lenders: Lenders,
        lender: Lender,
        groups: list[LentGroup],
        progress: FetchProgress,
        host: HostPoolView,
        *,
        left_s: Callable[[], float],
    ) -> None:
        """Prepare; ``left_s`` returns how much time is left."""
        self._lenders = lenders
        self._lender = lender
        self._groups = groups
        self._progress = progress
        self._host = host
        self._left_s = left_s

    async def connect(self) -> str:
        """Establish a connection to the lender; return "", or why there is none."""
        return await self._lenders.connect(self._lender, self._left_s)

    async def bring(self, report: Callable[[], Awaitable[None]]) -> str:
        """Bring the available chunks; ``report`` is called at intervals. Return "", or why it ended early.

        Later groups may be in host memory before earlier ones; only chunks that arrived in order are counted. When it
        returns or is cancelled, nothing of it is under way but late reads into memory of the lenders' own.
        """
        waiting = deque(self._groups)
        ahead: deque[tuple[LentGroup, asyncio.Task[tuple[int, str]]]] = deque()
        try:
            while waiting or ahead:
                while waiting and len(ahead) < READS_AHEAD:
                    group = waiting.popleft()
                    bringing = self._lenders.bring(self._lender, group, self._host, self._left_s)
                    ahead.append((group, asyncio.create_task(bringing)))
                group, reading = ahead[0]
                chunks, error = await asyncio.shield(reading)
                ahead.popleft()
                sizes = group.chunk_bytes(self._host.geometry.page_bytes)[:chunks]
                told = [self._progress.arrived("lender", nbytes) for nbytes in sizes]
                if error:
                    return error
                if any(told) and (waiting or ahead):
                    await report()
        finally:
            for _, reading in ahead:
                reading.cancel()
            for _, reading in ahead:
                await asyncio.wait({reading})
        return ""
