"""Popular prefixes that go out of fashion: new ones take over the ranks of old ones as time goes on."""

from __future__ import annotations

from thermocline.simulate.tokens import Span
from thermocline.simulate.workloads.asked import SHARED, name
from thermocline.simulate.workloads.open_loop import (
    Count,
    OpenLoopOptions,
    OpenLoopWorkload,
    Real,
    Zipf,
    between,
    length_of,
    whole_between,
)


class DriftOptions(OpenLoopOptions, frozen=True, kw_only=True):
    """0 means drawn by the seed."""

    prefixes: Count = 0  # Popular at one time.
    prefix_tokens: Count = 0  # On average.
    exponent: Real = 0.0  # Of their popularity.
    replaced: Real = 0.0  # Prefixes that are replaced with each request, on average.


class DriftWorkload(OpenLoopWorkload):
    """See the module."""

    def __init__(self, options: DriftOptions, seed: int) -> None:
        super().__init__(options, seed)
        count = whole_between(self._rng, options.prefixes, 40, 600)
        self._prefix_tokens = whole_between(self._rng, options.prefix_tokens, 300, 5000)
        self._popularity = Zipf(count, between(self._rng, options.exponent, 0.5, 1.3))
        self._replaced = between(self._rng, options.replaced, 0.01, 0.5)
        self._ranks = list(range(count))
        self._last = count

    def _prefix(self, number: int, time_s: float) -> tuple[Span, ...]:
        if self._rng.random() < self._replaced:
            self._ranks[self._rng.randrange(len(self._ranks))] = self._last
            self._last += 1
        chosen = self._ranks[self._popularity.draw(self._rng)]
        return (Span(name(SHARED, chosen), length_of(self._seed, chosen, self._prefix_tokens)),)
