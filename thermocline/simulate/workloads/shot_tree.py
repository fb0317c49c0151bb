"""Few-shot prompts in a tree: instructions, then domains, tasks and examples below one another, each with variants."""

from __future__ import annotations

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


class ShotTreeOptions(OpenLoopOptions, frozen=True, kw_only=True):
    """0 means drawn by the seed."""

    depth: Annotated[int, Meta(ge=0, le=8)] = 0  # Levels.
    variants: Annotated[int, Meta(ge=0, le=64)] = 0  # Of each level below one above.
    exponent: Real = 0.0  # Of the popularity of variants.
    shot_tokens: Count = 0  # Of one level, on average.


class ShotTreeWorkload(OpenLoopWorkload):
    """A question comes behind the last level, or behind any above it one time in ten."""

    def __init__(self, options: ShotTreeOptions, seed: int) -> None:
        super().__init__(options, seed)
        rng = self._rng
        self._depth = whole_between(rng, options.depth, 2, 5)
        self._count = whole_between(rng, options.variants, 3, 9)
        self._variants = Zipf(self._count, between(rng, options.exponent, 0.3, 1.5))
        self._shot_tokens = whole_between(rng, options.shot_tokens, 100, 1500)

    def _prefix(self, number: int, time_s: float) -> tuple[Span, ...]:
        rng = self._rng
        depth = rng.randint(1, self._depth) if rng.random() < 0.1 else self._depth
        spans, node = [], 0
        for _ in range(depth):
            node = node * self._count + 1 + self._variants.draw(rng)  # Children of a node follow one another.
            spans.append(Span(name(SHARED, node), length_of(self._seed, node, self._shot_tokens)))
        return tuple(spans)
