"""The clock of the inputs stream, between the stamps of its inputs. Pure: monotonic times (ns) are arguments.

Timers are set by the stamps of inputs, which the broker's clock makes. This process's own wall clock may be minutes
away from that one, on another machine or because somebody set either: every deadline would come as much too soon or
too late. So the time is that of the input that came last, and what has passed since by a clock that is never set. It is
behind by as long as that input was under way, and never ahead.
"""

from __future__ import annotations


class StreamClock:
    """Told of every input as it comes. Before the first, the time is 0 and nothing is due."""

    def __init__(self) -> None:
        self._time_ns = 0
        self._came_ns = 0

    def note(self, time_ns: int, now_ns: int) -> None:
        """Note the stamp of an input that came."""
        self._time_ns, self._came_ns = time_ns, now_ns

    def read_ns(self, now_ns: int) -> int:
        """Return what the broker's clock shows, in ns since 1970. Does not mutate."""
        return self._time_ns + (now_ns - self._came_ns) if self._time_ns else 0
