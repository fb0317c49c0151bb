"""The order of I/O calls: fetches, for which requests wait, go before saves, uploads and deletions.

Both kinds together keep ``depth`` calls under way, since a disk serves each call later the more it has to do; one more
while an urgent call starts beside the one that background work always has. Background work gets at most half of that,
and always one: saves yield, they do not starve.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class IoShares(Generic[T]):
    """Turns of two kinds, each in order of arrival."""

    def __init__(self, depth: int) -> None:
        """Allow ``depth`` calls at once, at most half of them, and always one, in the background.

        One background call is not counted when an urgent one starts, so ``depth`` + 1 calls may be under way.
        """
        self.depth = depth
        self.background_most = max(1, depth // 2)
        self._waiting: dict[bool, deque[T]] = {True: deque(), False: deque()}
        self._running = {True: 0, False: 0}

    def waiting(self, *, is_urgent: bool) -> int:
        """Return the number of turns of this kind that have not started."""
        return len(self._waiting[is_urgent])

    def running(self, *, is_urgent: bool) -> int:
        """Return the number of turns of this kind that have started and not ended."""
        return self._running[is_urgent]

    def ask(self, turn: T, *, is_urgent: bool) -> None:
        """Queue a turn; :meth:`due` returns it when it may start."""
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
        """Drop all waiting turns; return them."""
        waiting = [turn for line in self._waiting.values() for turn in line]
        for line in self._waiting.values():
            line.clear()
        return waiting

    def done(self, *, is_urgent: bool) -> None:
        """End a running turn."""
        self._running[is_urgent] -= 1

    def _may_share(self) -> bool:
        # One background call may be above the depth, so that it does not take a fetch's only place.
        return self._running[True] + max(0, self._running[False] - 1) < self.depth

    def _may_start_background(self) -> bool:
        if not self._running[False]:
            return True
        return (
            self._running[False] < self.background_most
            and self._running[True] + self._running[False] + len(self._waiting[True]) < self.depth
        )
