"""Base of the open-loop generators: Poisson arrivals, popularity by Zipf's law, parameters by the seed.

These generators are not fitted to a trace. Each option that is left at 0 is drawn by the seed from a range as wide as
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
from thermocline.simulate.workloads.asked import OUTPUT, QUESTION, Asked, Workload, name
from thermocline.simulate.workloads.lengths import around

Count = Annotated[int, Meta(ge=0)]
Real = Annotated[float, Meta(ge=0)]

SPREAD = 0.6  # Standard deviation of the logarithm of lengths.


class OpenLoopOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of all open-loop generators; 0 is drawn by the seed."""

    queries: Annotated[int, Meta(ge=1)] = 2000
    arrivals_s: Real = 0.0  # Requests a second, on average over the whole.
    question_tokens: Count = 0  # On average.
    answer_tokens: Count = 0  # On average.


class Zipf:
    """A distribution of numbers from 0 on: i is drawn in proportion to 1 / (i + 1) ** exponent."""

    def __init__(self, count: int, exponent: float) -> None:
        """Weigh the numbers from 0 to ``count`` - 1; with an ``exponent`` of 0 all are equally likely."""
        self._bounds = list(accumulate((place + 1) ** -exponent for place in range(count)))

    def draw(self, rng: Random) -> int:
        """Draw a number from 0 to ``count`` - 1."""
        return min(bisect(self._bounds, rng.random() * self._bounds[-1]), len(self._bounds) - 1)


def between(rng: Random, given: float, low: float, high: float) -> float:
    """Return ``given`` or, where that is 0, a log-uniform number from ``low`` to ``high``; draws in either case."""
    drawn = exp(rng.uniform(log(low), log(high)))
    return given or drawn


def whole_between(rng: Random, given: int, low: int, high: int) -> int:
    """Return :func:`between`, rounded."""
    return round(between(rng, given, low, high))


def length_of(seed: int, part: int, mean: float) -> int:
    """Return the tokens of a part that recurs: the same in every request, drawn by ``seed`` and ``part``."""
    return around(Random(seed * 1_000_003 + part), mean, SPREAD)


class OpenLoopWorkload(Workload, ABC):
    """Requests that follow no answer. A subclass chooses the prefix of each, and may vary the rate."""

    def __init__(self, options: OpenLoopOptions, seed: int) -> None:
        """Draw by ``seed`` the rate of arrivals and the lengths that ``options`` leaves at 0.

        An option that is given uses up its draw, too, so that it changes no other one.
        """
        self._seed = seed
        self._rng = rng = Random(seed)
        self._queries = options.queries
        self._arrivals_s = between(rng, options.arrivals_s, 0.5, 8)
        self._question_tokens = whole_between(rng, options.question_tokens, 30, 600)
        self._answer_tokens = whole_between(rng, options.answer_tokens, 10, 400)

    def requests(self) -> Iterator[Asked]:
        """Yield ``queries`` requests, each with its time of arrival."""
        time_s = 0.0
        for number in range(self._queries):
            time_s += self._rng.expovariate(self._arrivals_s * self._pace(time_s))
            prefix = self._prefix(number, time_s)
            question = Span(name(QUESTION, number), around(self._rng, self._question_tokens, SPREAD))
            answer = Span(name(OUTPUT, number), around(self._rng, self._answer_tokens, SPREAD))
            yield Asked((*prefix, question), answer, time_s)

    def _pace(self, time_s: float) -> float:
        """Return the arrival rate at this time, relative to the average."""
        return 1.0

    @abstractmethod
    def _prefix(self, number: int, time_s: float) -> tuple[Span, ...]:
        """Return the prefix of request ``number``."""
