"""Whether a process's memory stays flat. Pure: samples are (seconds, bytes)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

WARM_UP_S = 60.0
"""Caches of allocators, interpreters and libraries fill in the first minute of a process's life."""

LEAST_LIFE_S = 150.0
"""Processes with a shorter life are not judged."""

MOST_GROWTH_BYTES = 24 * 2**20
"""Allowed from the first quarter after the warm-up to the last. Keeping each request's tokens would soon exceed it."""

Samples = Sequence[tuple[float, int]]


@dataclass(frozen=True, slots=True)
class Growth:
    """Growth after the warm-up. ``slope`` is that of a least-squares line through all samples, in bytes a second."""

    seconds: float
    first_bytes: int
    last_bytes: int
    slope: float

    @property
    def is_flat(self) -> bool:
        """Whether the memory grew by MOST_GROWTH_BYTES at most."""
        return self.last_bytes - self.first_bytes <= MOST_GROWTH_BYTES


def growth(samples: Samples) -> Growth | None:
    """Return the growth between the medians of the first and last quarter; None for a short life."""
    if not samples or samples[-1][0] - samples[0][0] < LEAST_LIFE_S:
        return None
    warm = [sample for sample in samples if sample[0] >= samples[0][0] + WARM_UP_S]
    quarter = len(warm) // 4
    if quarter < 2:
        return None
    line = statistics.linear_regression([s for s, _ in warm], [float(n) for _, n in warm])
    return Growth(
        seconds=warm[-1][0] - warm[0][0],
        first_bytes=int(statistics.median(n for _, n in warm[:quarter])),
        last_bytes=int(statistics.median(n for _, n in warm[-quarter:])),
        slope=line.slope,
    )
