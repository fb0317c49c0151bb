"""Reports on their way from the compute thread to the event loop: never waited for, and bounded."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from services.worker.reports import Report
from shared.errors import InternalError


class ReportChannel:
    """``handle`` is called on the event loop with each report, in order."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, handle: Callable[[Report], None], *, capacity: int = 4096
    ) -> None:
        self._loop = loop
        self._handle = handle
        self._capacity = capacity
        self._reports: deque[Report] = deque()
        self._is_woken = False

    def post(self, report: Report) -> None:
        """Called by the compute thread. Raises InternalError when the loop has not taken reports for long."""
        if len(self._reports) >= self._capacity:
            raise InternalError(f"the event loop has not taken {self._capacity} reports: it hangs")
        self._reports.append(report)
        # One wake-up serves all reports that come before it is served.
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Handle what is there; on the event loop."""
        # Cleared first: a report that comes while we drain wakes us again rather than being overlooked.
        self._is_woken = False
        while self._reports:
            self._handle(self._reports.popleft())
