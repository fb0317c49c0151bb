"""A run of decode steps without a message to send: the time of k steps, and the steps that fit in a time.

With n requests the context grows by n tokens a step, and a step takes ``first_s`` plus ``slope_s`` for
each step before it; so k steps take ``k * first_s + slope_s * k * (k - 1) / 2``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt

from thermocline.simulate.events import NS_PER_S, to_ns


@dataclass(slots=True)
class DecodeRun:
    """One run of ``requests`` requests. ``steps`` is its planned length, which orders may cut short."""

    start_ns: int
    requests: int
    first_s: float
    slope_s: float
    steps: int

    def end_ns(self, steps: int) -> int:
        """Return the time at the end of the first ``steps`` steps."""
        return self.start_ns + to_ns(run_s(self.first_s, self.slope_s, steps))


def run_s(first_s: float, slope_s: float, steps: int) -> float:
    """Return the time of ``steps`` steps in seconds."""
    return steps * first_s + slope_s * steps * (steps - 1) / 2


def steps_until(run: DecodeRun, time_ns: int) -> int:
    """Return the fewest steps, at least one, that end at ``time_ns`` or later."""
    wanted_s = (time_ns - run.start_ns) / NS_PER_S
    half = run.slope_s / 2
    linear = run.first_s - half
    if half <= 0:
        steps = ceil(wanted_s / run.first_s)
    else:
        steps = ceil((sqrt(linear * linear + 4 * half * max(0.0, wanted_s)) - linear) / (2 * half))
    steps = max(1, steps)
    # Rounding may be off by a step at either side.
    while steps > 1 and run.end_ns(steps - 1) >= time_ns:
        steps -= 1
    while run.end_ns(steps) < time_ns:
        steps += 1
    return steps
