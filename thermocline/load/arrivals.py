"""Intended times of arrival in an open loop. Pure, given a seed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from random import Random
from typing import Literal

Arrivals = Literal["poisson", "constant"]


def arrival_times(arrivals: Arrivals, rate: float, seed: int) -> Iterator[float]:
    """Yield seconds from the start, without an end; ``rate`` is requests (or conversations) a second."""
    if arrivals == "constant":
        for number in itertools.count():
            yield number / rate
    # A generator of its own: the same seed gives the same arrivals, whatever the workload draws.
    rng, time_s = Random(f"bench-arrivals-{seed}"), 0.0
    while True:
        time_s += rng.expovariate(rate)
        yield time_s
