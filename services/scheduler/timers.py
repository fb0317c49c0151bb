"""The core's timers as the shell keeps them. Pure: the time is an argument."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from services.scheduler.core import CancelTimer, SetTimer


class Timers:
    """Timers by id. Each is due once per setting."""

    def __init__(self) -> None:
        """Begin with no timers."""
        self._at_ns: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []

    def __len__(self) -> int:
        """Return the number of timers that are set."""
        return len(self._at_ns)

    def apply(self, outputs: Iterable[object]) -> bool:
        """Set and cancel timers as these outputs of a step say; return whether any output was about a timer."""
        touched = False
        for output in outputs:
            if isinstance(output, SetTimer):
                self.set(output.timer_id, output.at_ns)
                touched = True
            elif isinstance(output, CancelTimer):
                self._at_ns.pop(output.timer_id, None)
                touched = True
        return touched

    def set(self, timer_id: str, at_ns: int) -> None:
        """Start a timer, or move it to ``at_ns``."""
        self._at_ns[timer_id] = at_ns
        heapq.heappush(self._heap, (at_ns, timer_id))
        if len(self._heap) > 64 + 4 * len(self._at_ns):
            # Most timers are cancelled long before they are due; their entries must not pile up until then.
            self._heap = [(due_ns, name) for name, due_ns in self._at_ns.items()]
            heapq.heapify(self._heap)

    def next_ns(self) -> int | None:
        """Return when the next timer is due (stream time, ns), or None without timers."""
        self._drop_stale()
        return self._heap[0][0] if self._heap else None

    def take_due(self, now_ns: int) -> list[tuple[str, int]]:
        """Remove and return (timer id, due time) of every timer due by now, earliest first."""
        due = []
        self._drop_stale()
        while self._heap and self._heap[0][0] <= now_ns:
            at_ns, timer_id = heapq.heappop(self._heap)
            del self._at_ns[timer_id]
            due.append((timer_id, at_ns))
            self._drop_stale()
        return due

    def _drop_stale(self) -> None:
        # A moved or cancelled timer leaves its old entry in the heap.
        while self._heap and self._at_ns.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
