"""Few-shot prompts in a tree: instructions, domains, tasks and examples at successive levels, each with variants."""

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
    """Options of the tree; 0 is drawn by the seed."""

    depth: Annotated[int, Meta(ge=0, le=8)] = 0  # Levels.
    variants: Annotated[int, Meta(ge=0, le=64)] = 0  # Children of each node.
    exponent: Real = 0.0  # Zipf exponent of the variants' popularity.
    shot_tokens: Count = 0  # Per level, on average.


class ShotTreeWorkload(OpenLoopWorkload):
    """Questions behind a path of the tree: to the last level, or one time in ten to a random level."""

    def __init__(self, options: ShotTreeOptions, seed: int) -> None:
        """Draw by ``seed`` what ``options`` leaves at 0, such as the depth of the tree and its variants."""
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
            node = node * self._count + 1 + self._variants.draw(rng)  # Children of a node have successive numbers.
            spans.append(Span(name(SHARED, node), length_of(self._seed, node, self._shot_tokens)))
        return tuple(spans)
