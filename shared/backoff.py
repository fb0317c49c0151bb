"""Waits between retries: each up to twice as long as the one before, with jitter.

Half of each wait is drawn at random, so that processes that failed together in one outage do not come back together.
The caller bounds the number of retries.
"""

from __future__ import annotations

import random
from collections.abc import Callable


def wait_s(attempt: int, first_s: float, most_s: float, chance: float) -> float:
    """Return the seconds to wait after ``attempt`` earlier failures; ``chance`` in [0, 1) spreads many callers out."""
    ceiling = min(most_s, first_s * 2.0 ** min(attempt, 32))
    return ceiling * (0.5 + 0.5 * chance)


class Backoff:
    """Growing waits in seconds: between half and all of ``first_s``, then of twice that, and so on up to ``most_s``."""

    def __init__(self, first_s: float, most_s: float, chance: Callable[[], float] = random.random) -> None:
        """``chance`` draws from [0, 1)."""
        self._first_s = first_s
        self._most_s = most_s
        self._chance = chance
        self._failures = 0

    def next_s(self) -> float:
        """Return the wait after another failure, in seconds."""
        failures, self._failures = self._failures, self._failures + 1
        return wait_s(failures, self._first_s, self._most_s, self._chance())

    def reset(self) -> None:
        """Note a success: the next failure is a first one."""
        self._failures = 0
