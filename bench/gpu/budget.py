"""How long a part of the benchmark may take, and what of it there is time for. Pure but for the clock.

A lent GPU is lent for minutes. What is measured goes from the most telling to the least, and nothing is begun that
would not end in time, as far as the longest one before it tells.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


class Budget:
    """``seconds`` from now on; None is no bound. ``left_out`` names what there was no time for."""

    def __init__(self, seconds: float | None, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._until_s = math.inf if seconds is None else clock_s() + seconds
        self.left_out: list[str] = []

    @property
    def left_s(self) -> float:
        return max(0.0, self._until_s - self._clock_s())

    def each(self, items: Iterable[Item], name: Callable[[Item], str] = str) -> Iterator[Item]:
        """Items as long as there is time for one more like the longest so far; the first in any case."""
        longest_s = 0.0
        waiting = list(items)
        while waiting:
            if longest_s >= self.left_s and longest_s:
                self.left_out += [name(item) for item in waiting]
                return
            began_s = self._clock_s()
            yield waiting.pop(0)
            longest_s = max(longest_s, self._clock_s() - began_s)
