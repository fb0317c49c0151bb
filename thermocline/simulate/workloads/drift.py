"""Popular prefixes that lose popularity: over time new ones take the ranks of old ones."""

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
    """Options of drifting popularity; 0 is drawn by the seed."""

    prefixes: Count = 0  # Prefixes in use at one time.
    prefix_tokens: Count = 0  # On average.
    exponent: Real = 0.0  # Zipf exponent of their popularity.
    replaced: Real = 0.0  # Prefixes that are replaced per request, on average.


class DriftWorkload(OpenLoopWorkload):
    """Requests with one of the prefixes, whose ranks new prefixes take over at random."""

    def __init__(self, options: DriftOptions, seed: int) -> None:
        """Draw by ``seed`` what ``options`` leaves at 0, such as the number of prefixes and the rate of replacement."""
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
