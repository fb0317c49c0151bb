"""What the families of one-off requests share: Poisson arrivals, popularity by Zipf's law, parameters by the seed.

No trace stands behind these families. Each option that is left at 0 is drawn by the seed from a range as wide as
deployments differ, so that a policy is judged by many workloads of a kind, and not by one that it can be tuned for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect
from collections.abc import Iterator
from itertools import accumulate
from math import exp, log
from random import Random
from typing import Annotated

import msgspec
from msgspec import Meta

from thermocline.simulate.tokens import Span
from thermocline.simulate.workloads.asked import OUTPUT, QUESTION, Asked, name
from thermocline.simulate.workloads.lengths import around

Count = Annotated[int, Meta(ge=0)]
Real = Annotated[float, Meta(ge=0)]

SPREAD = 0.6  # Of lengths: deviation of the logarithm.


class OpenLoopOptions(msgspec.Struct, frozen=True, kw_only=True):
    """0 means drawn by the seed."""

    queries: Annotated[int, Meta(ge=1)] = 2000
    arrivals_s: Real = 0.0  # Requests a second, on average over the whole.
    question_tokens: Count = 0  # On average.
    answer_tokens: Count = 0  # On average.


class Zipf:
    """Numbers from 0 on; number i is drawn in proportion to 1 / (i + 1) ** exponent."""

    def __init__(self, count: int, exponent: float) -> None:
        self._bounds = list(accumulate((place + 1) ** -exponent for place in range(count)))

    def draw(self, rng: Random) -> int:
        return min(bisect(self._bounds, rng.random() * self._bounds[-1]), len(self._bounds) - 1)


def between(rng: Random, given: float, low: float, high: float) -> float:
    """Return what was given or, where that is 0, a number from ``low`` to ``high``, evenly by its logarithm."""
    drawn = exp(rng.uniform(log(low), log(high)))
    return given or drawn


def whole_between(rng: Random, given: int, low: int, high: int) -> int:
    """:func:`between`, rounded."""
    return round(between(rng, given, low, high))


def length_of(seed: int, part: int, mean: float) -> int:
    """Tokens of a part that is asked for again: the same whenever it is."""
    return around(Random(seed * 1_000_003 + part), mean, SPREAD)


class OpenLoopWorkload(ABC):
    """Requests that wait for no answer. A family says which prefix each has, and may say how fast they come."""

    def __init__(self, options: OpenLoopOptions, seed: int) -> None:
        self._seed = seed
        self._rng = rng = Random(seed)
        self._queries = options.queries
        self._arrivals_s = between(rng, options.arrivals_s, 0.5, 8)
        self._question_tokens = whole_between(rng, options.question_tokens, 30, 600)
        self._answer_tokens = whole_between(rng, options.answer_tokens, 10, 400)

    def requests(self) -> Iterator[Asked]:
        """Each at its time."""
        time_s = 0.0
        for number in range(self._queries):
            time_s += self._rng.expovariate(self._arrivals_s * self._pace(time_s))
            prefix = self._prefix(number, time_s)
            question = Span(name(QUESTION, number), around(self._rng, self._question_tokens, SPREAD))
            answer = Span(name(OUTPUT, number), around(self._rng, self._answer_tokens, SPREAD))
            yield Asked((*prefix, question), answer, time_s)

    def follow_up(self, asked: Asked) -> tuple[float, Asked] | None:
        return None

    def _pace(self, time_s: float) -> float:
        """Arrivals at this time, relative to the average."""
        return 1.0

    @abstractmethod
    def _prefix(self, number: int, time_s: float) -> tuple[Span, ...]:
        """Which prefix request ``number`` has."""
