"""The run's clock, an argument so that tests of pacing need no waiting."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since some moment, and a way to wait."""

    def now_s(self) -> float: ...

    async def sleep_until(self, time_s: float) -> None:
        """Return at this time, or at once where it has passed."""


class MonotonicClock:
    """The machine's own."""

    def now_s(self) -> float:
        return time.perf_counter()

    async def sleep_until(self, time_s: float) -> None:
        await asyncio.sleep(max(0.0, time_s - time.perf_counter()))
