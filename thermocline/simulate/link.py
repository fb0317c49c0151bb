"""The link between a device and host memory: loads start at once, promotions and backups run in the time between.

A worker's loads come one batch after another, so they never queue. Background copies of a channel run one at a
time, in order, and pause while a load runs on the same channel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from thermocline.simulate.events import EventQueue

Done = Callable[[int], None]
"""Called with the nanoseconds from the copy's start to its end."""


@dataclass(slots=True)
class _Copy:
    start_ns: int
    finish_ns: int
    done: Done


class Channel:
    """One direction of a link, or both of a link that is not full duplex."""

    def __init__(self, events: EventQueue) -> None:
        """Begin idle; the ends of background copies are planned in ``events``."""
        self._events = events
        self._free_ns = 0  # When the last load ends.
        self._current: _Copy | None = None
        self._waiting: deque[tuple[int, Done]] = deque()
        self.background_ns = 0  # Link time of background copies.

    def load(self, duration_ns: int) -> None:
        """Begin a load, which occupies the channel for ``duration_ns``; a background copy in progress pauses."""
        self._free_ns = max(self._free_ns, self._events.now_ns + duration_ns)
        if self._current is not None:
            self._current.finish_ns += duration_ns

    def copy(self, duration_ns: int, done: Done) -> None:
        """Queue a background copy; ``done`` is called when it has ended."""
        self.background_ns += duration_ns
        self._waiting.append((duration_ns, done))
        if self._current is None:
            self._start_next()

    def _start_next(self) -> None:
        if not self._waiting:
            return
        duration_ns, done = self._waiting.popleft()
        start_ns = max(self._events.now_ns, self._free_ns)
        self._current = _Copy(start_ns, start_ns + duration_ns, done)
        self._events.at(self._current.finish_ns, self._look)

    def _look(self, _: None) -> None:
        """End the current copy, or wait on if a load has delayed it since this event was planned."""
        copy = self._current
        assert copy is not None
        if copy.finish_ns > self._events.now_ns:
            self._events.at(copy.finish_ns, self._look)
            return
        self._current = None
        self._start_next()
        copy.done(self._events.now_ns - copy.start_ns)


class Link:
    """Two channels: ``up`` for loads and promotions, ``down`` for backups."""

    def __init__(self, events: EventQueue, *, full_duplex: bool) -> None:
        """Make both channels in the time of ``events``; without ``full_duplex`` they are the same one."""
        self.up = Channel(events)
        self.down = Channel(events) if full_duplex else self.up
