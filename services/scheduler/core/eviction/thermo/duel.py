"""Which rule serves best, told by small shadow caches of metadata, one a rule."""

from __future__ import annotations

from heapq import heappop, heappush

import msgspec
import numpy as np

from services.scheduler.core.eviction.thermo.law import Law
from services.scheduler.core.eviction.thermo.rules import FREQUENCY, LEARNED, RULES, score, score_one

MOST_HELD = 1024
PER_REQUEST = 4.0
SLACK_SHARE = 32
HORIZON = 8.0  # Turnovers
Z = 1.0
LEAST = 2.0


class Duel(msgspec.Struct):
    rule: int = FREQUENCY
    capacity: float = 0.0  # In samples.
    distinct: int = 0
    lasts: dict[int, float] = {}
    codes: dict[int, int] = {}
    held: dict[int, int] = {}  # Bits of the rules that hold the sample.
    keys: list[dict[int, float]] = msgspec.field(default_factory=lambda: [{} for _ in range(RULES)])
    heaps: list[list[tuple[float, int]]] = msgspec.field(default_factory=lambda: [[] for _ in range(RULES)])
    wins: list[float] = msgspec.field(default_factory=lambda: [0.0] * (RULES * RULES))
    total: list[int] = msgspec.field(default_factory=lambda: [0] * RULES)

    def enter(self, digest: int, last: float, code: int) -> None:
        self.lasts[digest], self.codes[digest], self.held[digest] = last, code, (1 << RULES) - 1
        self.distinct += 1
        for rule in range(RULES):
            key = 0.0 if rule in (LEARNED, 1) else score_one(rule, last, last, code, None)
            if rule == 1: key = last
            self.keys[rule][digest] = key
            if rule != LEARNED:
                heappush(self.heaps[rule], (key, digest))

    def changed(self, digest: int, code: int) -> None:
        if digest not in self.held: return
        self.codes[digest] = code
        last = self.lasts[digest]
        for rule in range(2, RULES):
            if digest in self.keys[rule]:
                key = score_one(rule, last, last, code, None)
                self.keys[rule][digest] = key
                heappush(self.heaps[rule], (key, digest))

    def reused(self, digest: int) -> None:
        held = self.held.pop(digest, 0)
        if not held:
            return
        self.distinct -= 1
        del self.lasts[digest], self.codes[digest]
        for rule in range(RULES):
            if held >> rule & 1:
                del self.keys[rule][digest]
                self.total[rule] += 1
                for other in range(RULES):
                    if not held >> other & 1:
                        self.wins[rule * RULES + other] += 1

    def settle(self, now: float, law: Law, decay: float) -> None:
        cap = min(self.capacity, max(self.distinct / 2, 8.0))
        slack = cap / SLACK_SHARE
        for rule in range(RULES):
            keys = self.keys[rule]
            if len(keys) <= cap + slack:
                continue
            surplus = int(len(keys) - cap + slack)
            if rule == LEARNED:
                digests = list(keys)
                scores = score(LEARNED, now, np.array([self.lasts[d] for d in digests]), np.array([self.codes[d] for d in digests]), law)
                order = np.argsort(scores, kind="stable")[:surplus]
                gone = [digests[i] for i in order.tolist()]
            else:
                gone = []
                heap = self.heaps[rule]
                while len(gone) < surplus:
                    key, digest = heappop(heap)
                    if keys.get(digest) == key and digest not in gone:
                        gone.append(digest)
            for digest in gone:
                del keys[digest]
                left = self.held[digest] & ~(1 << rule)
                if left:
                    self.held[digest] = left
                else:
                    del self.held[digest], self.lasts[digest], self.codes[digest]
        self.wins = [w * decay for w in self.wins]

    def decide(self) -> int:
        best, margin = self.rule, 0.0
        for other in range(RULES):
            a, b = self.wins[other * RULES + self.rule], self.wins[self.rule * RULES + other]
            lead = a - b - LEAST - Z * (a + b) ** 0.5
            if lead > margin:
                best, margin = other, lead
        self.rule = best
        return best
