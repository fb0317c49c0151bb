"""Retrieval: a system prompt, then the few passages that fit the question best, the best first."""

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


class RetrievalOptions(OpenLoopOptions, frozen=True, kw_only=True):
    """Options of retrieval; 0 is drawn by the seed."""

    passages: Count = 0
    taken: Count = 0  # Passages per prompt.
    exponent: Real = 0.0  # Zipf exponent of their popularity.
    passage_tokens: Count = 0  # On average.
    system_tokens: Count = 0


class RetrievalWorkload(OpenLoopWorkload):
    """Questions over drawn passages; a passage that is drawn twice is in the prompt once."""

    def __init__(self, options: RetrievalOptions, seed: int) -> None:
        """Draw by ``seed`` what ``options`` leaves at 0, such as the number of passages and how many a prompt has."""
        super().__init__(options, seed)
        rng = self._rng
        self._popularity = Zipf(
            whole_between(rng, options.passages, 50, 1500), between(rng, options.exponent, 0.6, 1.4)
        )
        self._taken = whole_between(rng, options.taken, 1, 5)
        self._passage_tokens = whole_between(rng, options.passage_tokens, 150, 1500)
        self._system = Span(name(SHARED, 0), whole_between(rng, options.system_tokens, 100, 2000))

    def _prefix(self, number: int, time_s: float) -> tuple[Span, ...]:
        drawn = dict.fromkeys(1 + self._popularity.draw(self._rng) for _ in range(self._taken))
        lengths = [length_of(self._seed, passage, self._passage_tokens) for passage in drawn]
        passages = [Span(name(SHARED, passage), length) for passage, length in zip(drawn, lengths, strict=True)]
        return (self._system, *passages)
