"""Repeats of a request to a store, and the delays before them: exponential backoff with full jitter.

Full jitter draws the whole delay by chance, so that many storages that failed together in one outage do not come back
together. Time and chance are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """At most ``attempts`` in all; delays are drawn below ``base_s``, then twice that, and so on up to ``cap_s``."""

    attempts: int = 4
    base_s: float = 0.05
    cap_s: float = 1.0

    def next_delay_s(self, failed: int, *, now_s: float, deadline_s: float, chance: float) -> float | None:
        """Return how long to wait before the next attempt after ``failed`` of them (from 1) failed, None to give up.

        ``chance`` is uniform in [0, 1). An attempt that could only begin at or after the deadline is not made.
        """
        if failed >= self.attempts:
            return None
        # The exponent is bounded because 2.0 to the power of a large count overflows.
        delay_s = chance * min(self.cap_s, self.base_s * 2.0 ** min(failed - 1, 60))
        return delay_s if now_s + delay_s < deadline_s else None
