"""Waits between tries of the same thing: each up to twice as long as the one before, and never quite the same.

A half of each wait is drawn by chance, so that many processes whom one outage made fail together do not come back
together. How often something is tried is its caller's business.
"""

from __future__ import annotations

import random
from collections.abc import Callable


def wait_s(attempt: int, first_s: float, most_s: float, chance: float) -> float:
    """Seconds to wait behind ``attempt`` failures before this one, with ``chance`` in [0, 1) spreading many out."""
    ceiling = min(most_s, first_s * 2.0 ** min(attempt, 32))
    return ceiling * (0.5 + 0.5 * chance)


class Backoff:
    """Seconds to wait: between half and all of ``first_s``, then of twice that, and so on up to ``most_s``."""

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
        """Something succeeded: the next failure is a first one."""
        self._failures = 0
