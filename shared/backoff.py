"""Waits between tries of the same thing: each up to twice as long as the one before, and never quite the same.

A half of each wait is drawn by chance, so that many processes whom one outage made fail together do not come back
together. How often something is tried is its caller's business.
"""

from __future__ import annotations

import random
from collections.abc import Callable


class Backoff:
    """Seconds to wait: between half and all of ``first_s``, then of twice that, and so on up to ``most_s``."""

    def __init__(self, first_s: float, most_s: float, chance: Callable[[], float] = random.random) -> None:
        """``chance`` draws from [0, 1)."""
        self._first_s = self._ceiling_s = first_s
        self._most_s = most_s
        self._chance = chance

    def next_s(self) -> float:
        """The wait after another failure."""
        wait_s = self._ceiling_s * (0.5 + 0.5 * self._chance())
        self._ceiling_s = min(self._most_s, self._ceiling_s * 2)
        return wait_s

    def reset(self) -> None:
        """Something succeeded: the next failure is a first one."""
        self._ceiling_s = self._first_s
