"""Virtual time: one heap of events in order of time, then of planning. No other part has a clock."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Action = Callable[[Any], None]
"""Called with the argument that it was planned with."""

NS_PER_S = 1_000_000_000


class EventQueue:
    """The events and the current time: ``now_ns`` is that of the latest event."""

    def __init__(self, now_ns: int = 0) -> None:
        """Begin with no events, at ``now_ns`` nanoseconds of virtual time."""
        self.now_ns = now_ns
        self._heap: list[tuple[int, int, Action, Any]] = []
        self._planned = 0

    def __len__(self) -> int:
        """Return the number of events that are still to be handled."""
        return len(self._heap)

    @property
    def next_ns(self) -> int | None:
        """When the next event is due; None if there is none."""
        return self._heap[0][0] if self._heap else None

    def at(self, time_ns: int, action: Action, argument: Any = None) -> None:
        """Plan ``action(argument)``; a time in the past means now."""
        self._planned += 1
        heappush(self._heap, (max(time_ns, self.now_ns), self._planned, action, argument))

    def run_next(self) -> bool:
        """Advance to the next event and handle it; return False when none is left."""
        if not self._heap:
            return False
        self.now_ns, _, action, argument = heappop(self._heap)
        action(argument)
        return True


def to_ns(seconds: float) -> int:
    """Return nanoseconds, at least 1 for any positive time; 0 for others."""
    return max(1, round(seconds * NS_PER_S)) if seconds > 0 else 0
