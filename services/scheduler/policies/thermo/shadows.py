"""Shadow caches of metadata, one a rule, of sampled tokens: what each rule would have kept, and hit.

A sample stands for the tokens that were used around it. Each cache holds it until its rule evicts it or the prefix is
used again, which is a hit. All caches see the same samples and have one capacity, so rules are compared on what some of
them hit and others missed. Such hits come in bundles, because what one request touches comes back together: the
request, not the sample, is what evidence is counted in.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from services.scheduler.policies.thermo.elementary import log2_one
from services.scheduler.policies.thermo.rules import HALF_LIVES, LEARNED, RULES, fixed_key, score

if TYPE_CHECKING:
    from services.scheduler.policies.thermo.law import Law

_SLACK_SHARE = 128  # A cache exceeds its capacity by one in so many before it evicts down to as many below.
_SLICE = 512  # Samples that the learned rule scores behind one request. Of more it finds the lowest in several.
_MOST_EVICTED = 32  # At once, by one rule.
_SPARE = 64  # Void entries that a small heap may hold.
_ALL = (1 << RULES) - 1
_PAIRS = RULES * RULES
_PAIR_OF = tuple(divmod(place, RULES) for place in range(_PAIRS))
_HOLDERS = tuple(tuple(rule for rule in range(RULES) if held >> rule & 1) for held in range(1 << RULES))
"""The rules that a sample's ``held`` stands for."""


class Shadow(msgspec.Struct, array_like=True, gc=False):
    """A sampled token. ``held`` has a bit for each rule whose cache has it."""

    last: float
    code: int
    held: int = _ALL


class Shadows(msgspec.Struct):
    """``leads[RULES * i + j]`` is what rule i hit more than rule j lately, ``squares`` the same squared by request.

    At most RULES times the capacity in samples are remembered.
    """

    known: dict[int, Shadow] = {}  # By digest of the prefix.
    sizes: list[int] = msgspec.field(default_factory=lambda: [0] * RULES)
    heaps: list[list[tuple[float, int]]] = msgspec.field(default_factory=lambda: [[] for _ in range(RULES)])
    round: list[int] = []  # Digests that the learned rule's cache has; void where it has lost them.
    at: int = 0  # How many of them it has scored in the round that is under way; 0 is none.
    coming: list[tuple[float, int]] = []  # The lowest of each slice that was scored in it, by score.
    hits: list[int] = msgspec.field(default_factory=lambda: [0] * (1 << RULES))  # Of a request, by who held it.
    leads: list[float] = msgspec.field(default_factory=lambda: [0.0] * _PAIRS)
    squares: list[float] = msgspec.field(default_factory=lambda: [0.0] * _PAIRS)
    turnover_s: float = 1.0  # Of the cache, a power of two.
    is_full: bool = False  # Whether something was evicted ever.

    def enter(self, digest: int, last: float, code: int) -> None:
        """A prefix was used of which no sample is known."""
        shadow = self.known[digest] = Shadow(last, code)
        for rule in range(RULES):
            self.sizes[rule] += 1
            self._rank(rule, digest, shadow)

    def changed(self, digest: int, code: int) -> None:
        """The prefix has other features now."""
        shadow = self.known.get(digest)
        if shadow is None or shadow.code == code:
            return
        shadow.code = code
        for rule in range(RULES):
            if rule != LEARNED and shadow.held >> rule & 1:
                self._rank(rule, digest, shadow)

    def reused(self, digest: int) -> None:
        """The prefix was used again, which ends its sample."""
        shadow = self.known.pop(digest, None)
        if shadow is None:
            return
        self.hits[shadow.held] += 1
        for rule in range(RULES):
            self.sizes[rule] -= shadow.held >> rule & 1

    def settle(self, capacity: float, now: float, law: Law, fading: float, turnover_s: float) -> None:
        """Behind a request: count its hits, and those before it less, and evict what is too much for each rule."""
        self._count(fading)
        self._follow(turnover_s)
        slack = capacity / _SLACK_SHARE
        for rule in range(RULES):
            # The learned rule begins early to look for its lowest, because it finds them a few requests later.
            if self.sizes[rule] <= (capacity if rule == LEARNED else capacity + slack):
                continue
            self.is_full = True
            surplus = min(int(self.sizes[rule] - capacity + slack), _MOST_EVICTED)
            lowest = self._lowest_learned(surplus, now, law) if rule == LEARNED else self._lowest(rule, surplus)
            for digest in lowest:
                self._evict(rule, digest)

    def _follow(self, turnover_s: float) -> None:
        """Measure half-lives by the turnover once it is another by far, so that order changes a few times only."""
        if self.turnover_s / 2 < turnover_s < 2 * self.turnover_s:
            return
        self.turnover_s = 2.0 ** round(log2_one(max(turnover_s, 1e-9)))
        for rule in HALF_LIVES:
            self._rank_all(rule)

    def _count(self, fading: float) -> None:
        self.leads = [lead * fading for lead in self.leads]
        self.squares = [square * fading for square in self.squares]
        if not any(self.hits[:_ALL]):  # What all rules held tells none from another.
            self.hits[_ALL] = 0
            return
        by_rule = [0] * RULES
        for held, count in enumerate(self.hits):
            if count:
                for rule in _HOLDERS[held]:
                    by_rule[rule] += count
        for place, (one, other) in enumerate(_PAIR_OF):
            lead = by_rule[one] - by_rule[other]
            if lead:
                self.leads[place] += lead
                self.squares[place] += lead * lead
        self.hits = [0] * (1 << RULES)

    def _rank(self, rule: int, digest: int, shadow: Shadow) -> None:
        if rule == LEARNED:
            self.round.append(digest)
            if len(self.round) > 2 * self.sizes[LEARNED] + _SPARE:
                self.round = [
                    other
                    for other in dict.fromkeys(self.round)
                    if other in self.known and self.known[other].held >> LEARNED & 1
                ]
                self.at, self.coming = 0, []
            return
        heap = self.heaps[rule]
        heappush(heap, (fixed_key(rule, shadow.last, shadow.code, self.turnover_s), digest))
        if len(heap) > 2 * self.sizes[rule] + _SPARE:
            self._rank_all(rule)

    def _rank_all(self, rule: int) -> None:
        """Make the heap of a simple rule anew, of all that its cache has."""
        self.heaps[rule] = [
            (fixed_key(rule, known.last, known.code, self.turnover_s), other)
            for other, known in self.known.items()
            if known.held >> rule & 1
        ]
        heapify(self.heaps[rule])

    def _lowest(self, rule: int, count: int) -> list[int]:
        heap, found = self.heaps[rule], dict[int, None]()
        while len(found) < count:
            key, digest = heappop(heap)
            shadow = self.known.get(digest)
            if shadow is None or not shadow.held >> rule & 1:
                continue
            if fixed_key(rule, shadow.last, shadow.code, self.turnover_s) == key:
                found[digest] = None
        return list(found)

    def _lowest_learned(self, count: int, now: float, law: Law) -> list[int]:
        """The lowest of all, once every slice was scored; until then one slice more is, and there are none."""
        held = dict[int, Shadow]()
        for digest in islice(self.round, self.at, None):
            self.at += 1
            shadow = self.known.get(digest)
            if shadow is not None and shadow.held >> LEARNED & 1:
                held[digest] = shadow
                if len(held) == _SLICE:
                    break
        lasts = np.array([shadow.last for shadow in held.values()])
        codes = np.array([shadow.code for shadow in held.values()], dtype=np.int64)
        scores = score(LEARNED, now, lasts, codes, law)
        digests = list(held)
        order = np.argsort(scores, kind="stable")[:_MOST_EVICTED].tolist()
        self.coming += [(float(scores[place]), digests[place]) for place in order]
        if self.at < len(self.round):
            return []
        lowest = dict[int, None]()
        for _, digest in sorted(self.coming):
            shadow = self.known.get(digest)
            if len(lowest) < count and shadow is not None and shadow.held >> LEARNED & 1:
                lowest[digest] = None
        self.at, self.coming = 0, []
        return list(lowest)

    def _evict(self, rule: int, digest: int) -> None:
        shadow = self.known[digest]
        self.sizes[rule] -= 1
        shadow.held &= ~(1 << rule)
        if not shadow.held:
            del self.known[digest]
