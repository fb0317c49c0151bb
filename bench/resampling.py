"""How sure a median is: where it lies when the values are drawn again."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

RESAMPLES = 2_000


def median_interval(values: Sequence[float], seed: int) -> tuple[float, float]:
    """The interval that holds 95 % of the medians of resampled values."""
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return medians[int(0.025 * (RESAMPLES - 1))], medians[int(0.975 * (RESAMPLES - 1))]
