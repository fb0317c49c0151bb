"""Queue of reports from the compute thread to the event loop: bounded, and with a short wait at the most.

The compute thread keeps the interpreter's lock until the next step computes, and the loop, when it is woken, waits for
that lock. A first token is worth more than the start of a step, so behind one the compute thread yields the lock.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable

from services.worker.reports import Report
from shared.errors import InternalError

HAND_OVER_S = 0.002
"""Longest time that the compute thread stands still: the loop may be busy with something else."""


class ReportChannel:
    """Hands each report to a function on the event loop, in order."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, handle: Callable[[Report], None], *, capacity: int = 4096
    ) -> None:
        """Have ``loop`` call ``handle``; with ``capacity`` reports waiting, :meth:`post` raises."""
        self._loop = loop
        self._handle = handle
        self._capacity = capacity
        self._reports: deque[Report] = deque()
        self._is_woken = False
        self._taken = threading.Event()

    def post(self, report: Report) -> None:
        """Post a report from the compute thread.

        Behind one that begins an answer the thread waits until the loop has taken it, for ``HAND_OVER_S`` at the most.
        Raises InternalError when the loop has not taken reports for long.
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
        """Handle the posted reports; on the event loop."""
        # Cleared first: a report that comes while we drain wakes us again rather than being overlooked.
        self._is_woken = False
        while self._reports:
            report = self._reports.popleft()
            self._handle(report)
            if report.begins:
                self._taken.set()
