"""Two populations of prompts, one by day and one by night, whose shares and rates swing with the hour."""

from __future__ import annotations

from math import pi, sin
from typing import Annotated

from msgspec import Meta

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

_NIGHT = 1 << 24  # Numbers from here on are prompts of the night.


class DiurnalOptions(OpenLoopOptions, frozen=True, kw_only=True):
    """Options of the two populations; 0 is drawn by the seed."""

    day_s: Real = 0.0  # Length of a day in this run.
    swing: Annotated[float, Meta(ge=0, lt=1)] = 0.0  # Relative deviation of the rate at noon from the average.
    day_prompts: Count = 0
    night_prompts: Count = 0
    prompt_tokens: Count = 0  # On average.
    exponent: Real = 0.0  # Zipf exponent of the day prompts' popularity.


class DiurnalWorkload(OpenLoopWorkload):
    """Day and night. By night most requests come from a batch job, which uses its prompts in turn."""

    def __init__(self, options: DiurnalOptions, seed: int) -> None:
        """Draw by ``seed`` what ``options`` leaves at 0, such as the length of a day and the swing of the rate."""
        super().__init__(options, seed)
        rng = self._rng
        whole_s = options.queries / self._arrivals_s
        self._day_s = between(rng, options.day_s, whole_s / 8, whole_s / 2)
        self._swing = between(rng, options.swing, 0.2, 0.9)
        exponent = between(rng, options.exponent, 0.5, 1.2)
        self._by_day = Zipf(whole_between(rng, options.day_prompts, 50, 500), exponent)
        self._by_night = whole_between(rng, options.night_prompts, 20, 200)
        self._prompt_tokens = whole_between(rng, options.prompt_tokens, 300, 5000)
        self._jobs = 0

    def _daylight(self, time_s: float) -> float:
        """Return a value from -1 at midnight to 1 at noon."""
        return sin(2 * pi * time_s / self._day_s)

    def _pace(self, time_s: float) -> float:
        return 1 + self._swing * self._daylight(time_s)

    def _prefix(self, number: int, time_s: float) -> tuple[Span, ...]:
        if self._rng.random() < (1 + 0.9 * self._daylight(time_s)) / 2:
            chosen = self._by_day.draw(self._rng)
        else:
            chosen = _NIGHT + self._jobs % self._by_night
            self._jobs += 1
        return (Span(name(SHARED, chosen), length_of(self._seed, chosen, self._prompt_tokens)),)
