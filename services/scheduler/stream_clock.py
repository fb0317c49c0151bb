"""The time of the inputs stream between the stamps of its inputs. Pure: monotonic times (ns) are arguments.

Timers are set by the stamps of inputs, which the broker's clock makes. This process's own wall clock may be minutes
away from that one, on another machine or because one was set: every deadline would come too early or too late by as
much. So the time is the last input's stamp plus the time since it came, by a clock that is never set. It is behind by
as long as that input was in flight, and never ahead.
"""

from __future__ import annotations


class StreamClock:
    """The broker's time, estimated from the last input. Before the first, it is 0 and nothing is due."""

    def __init__(self) -> None:
        """Begin before the first input."""
        self._time_ns = 0
        self._came_ns = 0

    def note(self, time_ns: int, now_ns: int) -> None:
        """Note that an input stamped ``time_ns`` came at ``now_ns``."""
        self._time_ns, self._came_ns = time_ns, now_ns

    def read_ns(self, now_ns: int) -> int:
        """Return the estimate of the broker's clock, in ns since 1970. Does not change the state."""
        return self._time_ns + (now_ns - self._came_ns) if self._time_ns else 0
