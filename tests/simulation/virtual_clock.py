"""The only clock of a simulated cell: what is to happen, in order of time and then of asking."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class VirtualClock:
    """Nanoseconds since 1970, which only pass when the next thing happens."""

    def __init__(self, now_ns: int = 1_000_000_000_000) -> None:
        self.now_ns = now_ns
        self._next = 0
        self._heap: list[tuple[int, int, Action]] = []

    @property
    def now_s(self) -> float:
        return self.now_ns / 1e9

    def after(self, delay_us: float, action: Action) -> None:
        """Let something happen so much later. What is asked for first happens first at equal times."""
        self.at(self.now_ns + max(0, int(delay_us * 1_000)), action)

    def at(self, at_ns: int, action: Action) -> None:
        """Let something happen at a time; at once where that has passed."""
        heapq.heappush(self._heap, (max(at_ns, self.now_ns), self._next, action))
        self._next += 1

    def step(self) -> bool:
        """Let the next thing happen; returns whether there was one."""
        if not self._heap:
            return False
        self.now_ns, _, action = heapq.heappop(self._heap)
        action()
        return True
