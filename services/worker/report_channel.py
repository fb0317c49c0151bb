"""Reports on their way from the compute thread to the event loop: bounded, and never waited for long.

The compute thread keeps the interpreter's lock through all that it does before the next step computes, and the loop,
when it is woken, waits for that. A first token is worth more than the start of a step: behind one the lock goes on.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from services.worker.reports import Report
from shared.errors import InternalError

HAND_OVER_S = 0.002
"""The longest that the compute thread stands still: the loop may be busy with something else."""


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
        self._taken = threading.Event()

    def post(self, report: Report) -> None:
        """Post a report from the compute thread. Behind one that begins an answer it stands still until the loop has
        taken that, for ``HAND_OVER_S`` at the most. Raises InternalError when the loop has not taken reports for long.
        """
        if len(self._reports) >= self._capacity:
            raise InternalError(f"the event loop has not taken {self._capacity} reports: it hangs")
        if report.begins:
            self._taken.clear()
        self._reports.append(report)
        # One wake-up serves all reports that come before it is served.
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon_threadsafe(self.drain)
        if report.begins:
            self._taken.wait(HAND_OVER_S)

    def drain(self) -> None:
        """Handle what is there; on the event loop."""
        # Cleared first: a report that comes while we drain wakes us again rather than being overlooked.
        self._is_woken = False
        while self._reports:
            report = self._reports.popleft()
            self._handle(report)
            if report.begins:
                self._taken.set()
