"""The run's clock, an argument so that tests of pacing need no waiting."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """A clock that a run reads and waits by."""

    def now_s(self) -> float:
        """Return seconds since an arbitrary moment; never decreases."""
        ...

    async def sleep_until(self, time_s: float) -> None:
        """Wait until ``now_s()`` is ``time_s``; return at once if it has passed."""


class MonotonicClock:
    """The machine's clock."""

    def now_s(self) -> float:
        """Return ``time.perf_counter()``, whose resolution suits gaps between tokens."""
        return time.perf_counter()

    async def sleep_until(self, time_s: float) -> None:
        """Sleep until ``time_s``, or yield to the event loop once if it has passed.

        A sleep of uvloop counts whole milliseconds from a time that is read once for each turn of its loop, so it may
        end early, which would count as time of the server.
        """
        await asyncio.sleep(max(0.0, time_s - time.perf_counter()))
        while (left_s := time_s - time.perf_counter()) > 0:  # noqa: ASYNC110 - there is no event but the time itself.
            await asyncio.sleep(left_s)
