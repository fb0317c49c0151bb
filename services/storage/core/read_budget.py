"""When bytes may be read that are limited to so many a second: a token bucket, kept as the time until which all that
was granted takes at that rate. Pure.

What is granted has been waited for: a read of n bytes begins n / rate after the one before it, as on a disk of that
speed. A bucket that was not used for a while grants a little at once.
"""

from __future__ import annotations

BURST_S = 0.05
"""An idle bucket holds what the rate brings in this time: enough that timers that fire late cost nothing."""


class ReadBudget:
    """The caller holds the turn: between :meth:`due_s` and :meth:`take` there are no other calls."""

    def __init__(self, bytes_per_s: float) -> None:
        """``bytes_per_s`` is above 0."""
        self.bytes_per_s = bytes_per_s
        self._spent_until_s = float("-inf")

    def due_s(self, nbytes: int, now_s: float) -> float:
        """Return the time at which ``nbytes`` may be taken. Does not mutate."""
        return max(self._spent_until_s, now_s - BURST_S) + nbytes / self.bytes_per_s

    def take(self, due_s: float) -> None:
        """Take the bytes that :meth:`due_s` announced."""
        self._spent_until_s = due_s
