"""Rates as token buckets (Turner, 1986). Pure: time is an argument, in monotonic seconds.

A bucket holds one minute's worth, so a tenant that was quiet may send that much at once. Spending may exceed the
level, because an answer's length is known at its end: the next request waits until the debt is refilled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

MINUTE_S = 60.0


@dataclass(slots=True)
class Bucket:
    """A bucket that held ``level`` units at ``at_s``; it refills by ``per_minute``, which is also its capacity."""

    per_minute: int
    level: float
    at_s: float

    def fill(self, now_s: float) -> None:
        """Add the units that have flowed in until ``now_s``."""
        passed_s = max(0.0, now_s - self.at_s)
        self.level = min(float(self.per_minute), self.level + passed_s * self.per_minute / MINUTE_S)
        self.at_s = max(self.at_s, now_s)

    def wait_s(self, units: int, now_s: float) -> float:
        """Return the seconds until ``units`` may be spent, 0 for now. A full bucket allows more than its capacity."""
        self.fill(now_s)
        lacking = min(units, self.per_minute) - self.level
        return max(0.0, lacking * MINUTE_S / self.per_minute)

    def spend(self, units: int, now_s: float) -> None:
        """Take units out; the level may become negative."""
        self.fill(now_s)
        self.level -= units

    def remaining(self, now_s: float) -> int:
        """Return the whole units left, at least 0."""
        self.fill(now_s)
        return max(0, int(self.level))

    def reset_s(self, now_s: float) -> float:
        """Return the seconds until the bucket is full."""
        self.fill(now_s)
        return (self.per_minute - self.level) * MINUTE_S / self.per_minute


def full(per_minute: int, now_s: float) -> Bucket | None:
    """Return a full bucket, or None where there is no limit."""
    return Bucket(per_minute, float(per_minute), now_s) if per_minute else None


def resized(bucket: Bucket | None, per_minute: int, now_s: float) -> Bucket | None:
    """Return the bucket under another limit: what was spent of the last minute stays spent."""
    if bucket is None or not per_minute:
        return full(per_minute, now_s)
    bucket.fill(now_s)
    return replace(bucket, per_minute=per_minute, level=bucket.level + per_minute - bucket.per_minute)


def duration(seconds: float) -> str:
    """Return seconds in the form of OpenAI's headers: "20ms", "1.5s", "6m0s"."""
    if seconds < 1:
        return f"{-(-seconds * 1000 // 1):.0f}ms" if seconds > 0 else "0s"
    minutes, rest = divmod(-(-seconds * 10 // 1) / 10, 60)
    return f"{minutes:.0f}m{rest:g}s" if minutes else f"{rest:g}s"
