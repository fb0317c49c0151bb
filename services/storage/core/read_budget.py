"""A token bucket for reads of a limited rate, kept as the time at which all granted bytes are read at that rate. Pure.

Bytes are granted after a wait: a read of n bytes begins n / rate after the one before it, as on a disk of that
speed. A bucket that was not used for a while grants a little at once.
"""

from __future__ import annotations

BURST_S = 0.05
"""An idle bucket holds the bytes of this time, enough that timers that fire late cost nothing."""


class ReadBudget:
    """The state of one bucket. The caller holds a lock from :meth:`due_s` to :meth:`take`."""

    def __init__(self, bytes_per_s: float) -> None:
        """Begin full; ``bytes_per_s`` is above 0."""
        self.bytes_per_s = bytes_per_s
        self._spent_until_s = float("-inf")

    def due_s(self, nbytes: int, now_s: float) -> float:
        """Return the time at which ``nbytes`` may be taken. Does not change the state."""
        return max(self._spent_until_s, now_s - BURST_S) + nbytes / self.bytes_per_s

    def take(self, due_s: float) -> None:
        """Take the bytes that :meth:`due_s` announced."""
        self._spent_until_s = due_s
