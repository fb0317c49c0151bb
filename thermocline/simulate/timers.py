"""The core's timers in virtual time. Most are cancelled long before they are due, and must not accumulate."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from thermocline.simulate.events import EventQueue


class Timers:
    """Timers by id. Only the earliest has an event in the queue; cancelled ones are removed when they are many."""

    def __init__(self, queue: EventQueue, fire: Callable[[str], None]) -> None:
        """Begin with no timers; ``fire`` is called with the id of each timer at its time in ``queue``."""
        self._queue = queue
        self._fire = fire
        self._due: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []
        self._planned_ns = 0  # Time of the earliest planned event; 0 is none.

    def set(self, timer_id: str, at_ns: int) -> None:
        """Set a timer, or move it to another time."""
        self._due[timer_id] = at_ns
        heappush(self._heap, (at_ns, timer_id))
        if len(self._heap) > 2 * len(self._due) + 64:
            self._heap = [(due_ns, name) for name, due_ns in self._due.items()]
            heapify(self._heap)
        self._plan()

    def cancel(self, timer_id: str) -> None:
        """Forget a timer, if there is one."""
        self._due.pop(timer_id, None)

    def _plan(self) -> None:
        if not self._heap:
            return
        at_ns = self._heap[0][0]
        if not self._planned_ns or at_ns < self._planned_ns:
            self._planned_ns = at_ns
            self._queue.at(at_ns, self._look, at_ns)

    def _look(self, planned_ns: int) -> None:
        if planned_ns != self._planned_ns:
            return  # An earlier event replaced this one.
        self._planned_ns = 0
        while self._heap and self._heap[0][0] <= self._queue.now_ns:
            at_ns, timer_id = heappop(self._heap)
            if self._due.get(timer_id) == at_ns:
                del self._due[timer_id]
                self._fire(timer_id)
        while self._heap and self._due.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        self._plan()
