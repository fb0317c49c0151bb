"""Who may use an I/O thread: fetches, for which requests wait, go before saves, uploads and deletions.

Both kinds together keep at most ``depth`` calls under way, since a disk serves each call later the more it has to do.
Background work gets half of that at the most, and always one: saves yield, they do not starve.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class IoShares(Generic[T]):
    """Turns of two kinds, each in order of arrival."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.background_most = max(1, depth // 2)
        self._waiting: dict[bool, deque[T]] = {True: deque(), False: deque()}
        self._running = {True: 0, False: 0}

    def waiting(self, *, is_urgent: bool) -> int:
        return len(self._waiting[is_urgent])

    def running(self, *, is_urgent: bool) -> int:
        return self._running[is_urgent]

    def ask(self, turn: T, *, is_urgent: bool) -> None:
        """Stand in line; :meth:`due` says when it is this turn's."""
        self._waiting[is_urgent].append(turn)

    def due(self) -> list[tuple[bool, T]]:
        """Return turns that may start now, each with whether it is urgent; they count as running from here on."""
        due: list[tuple[bool, T]] = []
        while self._waiting[True] and self._running[True] < self.depth and self._may_share():
            self._running[True] += 1
            due.append((True, self._waiting[True].popleft()))
        while self._waiting[False] and self._may_start_background():
            self._running[False] += 1
            due.append((False, self._waiting[False].popleft()))
        return due

    def give_up(self) -> list[T]:
        """End all turns; return those that waited for one."""
        waiting = [turn for line in self._waiting.values() for turn in line]
        for line in self._waiting.values():
            line.clear()
        return waiting

    def done(self, *, is_urgent: bool) -> None:
        """End a running turn."""
        self._running[is_urgent] -= 1

    def _may_share(self) -> bool:
        # One of the background may be over the depth; it must not keep a fetch from the only place.
        return self._running[True] + max(0, self._running[False] - 1) < self.depth

    def _may_start_background(self) -> bool:
        if not self._running[False]:
            return True
        return (
            self._running[False] < self.background_most
            and self._running[True] + self._running[False] + len(self._waiting[True]) < self.depth
        )
