"""Random lengths in tokens. All draws come from the generator that is passed in."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import log
from random import Random


def around(rng: Random, mean: float, spread: float) -> int:
    """Return a length of at least 1 with this mean: log-normal, with ``spread`` as the deviation of its logarithm."""
    return max(1, round(rng.lognormvariate(log(max(mean, 1e-9)) - spread * spread / 2, spread)))


def scaled_to_mean(lengths: Sequence[int], weights: Sequence[float], mean: float) -> list[int]:
    """Return ``lengths`` scaled so that their weighted mean is ``mean``; each at least 1."""
    weighted = sum(length * weight for length, weight in zip(lengths, weights, strict=True)) / sum(weights)
    return [max(1, round(length * mean / weighted)) for length in lengths]


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """Divide ``total`` in proportion to ``weights``, by rounding the running sum; the shares sum to ``total``."""
    whole = sum(weights)
    bounds = [round(total * part / whole) for part in accumulate(weights)]
    return [bound - before for before, bound in zip([0, *bounds[:-1]], bounds, strict=True)]
