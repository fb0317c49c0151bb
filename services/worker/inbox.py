"""Queue of orders from the event loop to the compute thread, in order and bounded."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from shared.errors import InternalError
from shared.messages.worker_plans import WorkerOrder


@dataclass(frozen=True, slots=True)
class Arrival:
    """An order, the number of its plan (0: made by the worker itself) and when it arrived, wall-clock ns."""

    number: int
    order: WorkerOrder
    arrived_ns: int


class Inbox:
    """One writer (the event loop), one reader (the compute thread), which sleeps while the queue is empty."""

    def __init__(self, capacity: int = 65_536) -> None:
        """Bound the queue to ``capacity`` orders, beyond which :meth:`put` raises."""
        self._capacity = capacity
        self._arrivals: deque[Arrival] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._woken = False

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called; the reader should end."""
        return self._closed

    def __len__(self) -> int:
        """Return the number of waiting orders."""
        return len(self._arrivals)

    def put(self, arrival: Arrival) -> None:
        """Append. Raises InternalError when full: the scheduler keeps a few batches ahead, never so many."""
        if len(self._arrivals) >= self._capacity:
            raise InternalError(f"{self._capacity} orders wait for the compute thread; it hangs")
        with self._changed:
            self._arrivals.append(arrival)
            self._changed.notify()

    def take(self) -> Arrival | None:
        """Remove and return the oldest order; None if there is none."""
        return self._arrivals.popleft() if self._arrivals else None

    def peek(self) -> Arrival | None:
        """Return the oldest order without removing it; None if there is none."""
        return self._arrivals[0] if self._arrivals else None

    def wait(self) -> None:
        """Sleep until there is an order to take, ``wake`` is called or the inbox is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._woken or bool(self._arrivals))
            self._woken = False

    def wake(self) -> None:
        """Return the reader from its sleep, now or the next time; safe from any thread."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def close(self) -> None:
        """Wake the reader for the last time."""
        with self._changed:
            self._closed = True
            self._changed.notify()
