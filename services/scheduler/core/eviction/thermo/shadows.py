"""Shadow caches of metadata, one for each rule, of sampled tokens: what each rule would have kept, and hit.

A sample stands for the tokens that were used around it, and is held or not by each rule's cache by itself. All caches
have one capacity, in samples, and hold the same samples but for what each rule has evicted. A reuse counts for those
that hold its sample; what is kept is how often one rule holds what another has lost, lately.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import msgspec
import numpy as np

from services.scheduler.core.eviction.thermo.law import Law
from services.scheduler.core.eviction.thermo.rules import LEARNED, RULES, fixed_key, score

_SLACK_SHARE = 32  # A cache is over its capacity by up to one in so many before it evicts down to as many below.
_SPARE = 64  # Void entries that a small heap may hold.
_ALL = (1 << RULES) - 1


class Sample(msgspec.Struct, array_like=True, gc=False):
    """A token that was used, until it is used again. ``held`` has a bit for each rule."""

    last: float
    code: int
    held: int = _ALL


class Shadows(msgspec.Struct):
    """``wins[RULES * i + j]`` counts reuses that rule i held and rule j had lost, faded by time."""

    samples: dict[int, Sample] = {}  # By digest of the prefix.
    sizes: list[int] = msgspec.field(default_factory=lambda: [0] * RULES)
    heaps: list[list[tuple[float, int]]] = msgspec.field(default_factory=lambda: [[] for _ in range(RULES)])
    wins: list[float] = msgspec.field(default_factory=lambda: [0.0] * (RULES * RULES))
    is_full: bool = False  # Whether something was evicted ever.

    def enter(self, digest: int, last: float, code: int) -> None:
        """A token was used; its prefix is not sampled yet."""
        sample = self.samples[digest] = Sample(last, code)
        for rule in range(RULES):
            self.sizes[rule] += 1
            self._rank(rule, digest, sample)

    def changed(self, digest: int, code: int) -> None:
        """Something else is known of a prefix now."""
        sample = self.samples.get(digest)
        if sample is not None and sample.code != code:
            sample.code = code
            for rule in range(RULES):
                if sample.held >> rule & 1:
                    self._rank(rule, digest, sample)

    def reused(self, digest: int) -> None:
        """The prefix was used again, which ends its sample."""
        sample = self.samples.pop(digest, None)
        if sample is None:
            return
        for rule in range(RULES):
            if sample.held >> rule & 1:
                self.sizes[rule] -= 1
                for other in range(RULES):
                    self.wins[RULES * rule + other] += not sample.held >> other & 1

    def settle(self, capacity: float, now: float, law: Law, fading: float) -> None:
        """Let every rule evict what is too much for its cache, and let older reuses count less."""
        self.wins = [count * fading for count in self.wins]
        slack = capacity / _SLACK_SHARE
        for rule in range(RULES):
            if self.sizes[rule] <= capacity + slack:
                continue
            surplus = min(int(self.sizes[rule] - capacity + slack), self.sizes[rule])
            self.is_full = True
            lowest = self._lowest_learned(surplus, now, law) if rule == LEARNED else self._lowest(rule, surplus)
            for digest in lowest:
                self._evict(rule, digest)

    def _rank(self, rule: int, digest: int, sample: Sample) -> None:
        if rule == LEARNED:
            return
        heap = self.heaps[rule]
        heappush(heap, (fixed_key(rule, sample.last, sample.code), digest))
        if len(heap) > 2 * self.sizes[rule] + _SPARE:
            heap[:] = [
                (fixed_key(rule, known.last, known.code), other)
                for other, known in self.samples.items()
                if known.held >> rule & 1
            ]
            heapify(heap)

    def _lowest(self, rule: int, count: int) -> list[int]:
        heap, found = self.heaps[rule], dict[int, None]()
        while len(found) < count:
            key, digest = heappop(heap)
            sample = self.samples.get(digest)
            if sample is not None and sample.held >> rule & 1 and fixed_key(rule, sample.last, sample.code) == key:
                found[digest] = None
        return list(found)

    def _lowest_learned(self, count: int, now: float, law: Law) -> list[int]:
        held = [(digest, known) for digest, known in self.samples.items() if known.held >> LEARNED & 1]
        lasts = np.array([known.last for _, known in held])
        codes = np.array([known.code for _, known in held], dtype=np.int64)
        scores = score(LEARNED, now, lasts, codes, law)
        return [held[place][0] for place in np.argsort(scores, kind="stable")[:count].tolist()]

    def _evict(self, rule: int, digest: int) -> None:
        sample = self.samples[digest]
        self.sizes[rule] -= 1
        sample.held &= ~(1 << rule)
        if not sample.held:
            del self.samples[digest]
