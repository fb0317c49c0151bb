"""Virtual time: one heap of things to come, in order of time and then of being planned. Nothing else has a clock."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Action = Callable[[Any], None]
"""Called with the argument that it was planned with."""

NS_PER_S = 1_000_000_000


class EventQueue:
    """``now_ns`` is the time of the event that is being handled, or was handled last."""

    def __init__(self, now_ns: int = 0) -> None:
        self.now_ns = now_ns
        self._heap: list[tuple[int, int, Action, Any]] = []
        self._planned = 0

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_ns(self) -> int | None:
        """When the next event is due, or None."""
        return self._heap[0][0] if self._heap else None

    def at(self, time_ns: int, action: Action, argument: Any = None) -> None:
        """Plan ``action(argument)``; a time that has passed already means now."""
        self._planned += 1
        heappush(self._heap, (max(time_ns, self.now_ns), self._planned, action, argument))

    def run_next(self) -> bool:
        """Handle the next event; False when nothing is left."""
        if not self._heap:
            return False
        self.now_ns, _, action, argument = heappop(self._heap)
        action(argument)
        return True


def to_ns(seconds: float) -> int:
    """Nanoseconds, at least one for any time at all."""
    return max(1, round(seconds * NS_PER_S)) if seconds > 0 else 0
