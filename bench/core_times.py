"""Times of calls: by the wall's clock, and by the processor time of this thread.

On a machine that other processes use too, the second says what a call costs and the first what its caller waited.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TypeVar

R = TypeVar("R")


class Times:
    """Milliseconds of calls."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def take(self, call: Callable[[], R]) -> R:
        """Call it, and note what it took."""
        cpu = time.thread_time_ns()
        wall = time.perf_counter_ns()
        result = call()
        self.wall.append((time.perf_counter_ns() - wall) / 1e6)
        self.cpu.append((time.thread_time_ns() - cpu) / 1e6)
        return result

    def add(self, other: Times) -> None:
        """Take over the times of others."""
        self.wall += other.wall
        self.cpu += other.cpu

    def summary(self) -> dict[str, float]:
        """How many, and the medians, 99th percentiles and greatest."""
        return {"count": len(self.wall)} | _percentiles("", self.wall) | _percentiles("cpu_", self.cpu)


def _percentiles(name: str, times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        f"{name}p50_ms": round(statistics.median(ordered), 4),
        f"{name}p99_ms": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 4),
        f"{name}max_ms": round(ordered[-1], 4),
    }
