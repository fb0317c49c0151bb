"""Shadow caches of sampled tokens, one for each rule, without data: what each rule would have kept, and hit.

A sample stands for the tokens that were used around it, and weighs more where its own prefix has more of them. Each
cache holds it until its rule evicts it or the prefix is used again, which is a hit. All caches see the same samples and
have one capacity, so rules are compared on what some of them hit and others missed. Such hits come in bundles, because
prefixes that one request touches come back together: evidence is counted by request, not by sample.

A cache evicts now and then, several samples at once: down to half of what it evicts below its capacity, so that it has
its capacity on average. The samples are columns with a row each, so that this is done by whole columns. It falls due
with a request and is done before the next one at the latest, best where no request waits for it.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from services.scheduler.policies.thermo.elementary import log2_one
from services.scheduler.policies.thermo.rules import LEARNED, RULES, order_keys, score

if TYPE_CHECKING:
    from services.scheduler.policies.thermo.law import Law
    from services.scheduler.policies.thermo.samples import Floats, Ints

SLACK_SHARE = 64  # A cache evicts when the samples that came since weigh one in so many of its capacity.
LEAST_SLACK = 4  # The least weight of these samples.
SMALL = 512  # Rows up to which all rules evict at once; with more, one rule at a time.
_ALL = (1 << RULES) - 1
_PAIRS = RULES * RULES
_MOST_WEIGHT = 2.0**40
_SPARE = 64  # Ended samples that are not worth removing.
_FLOAT = Struct("<d")
_WHOLE = Struct("<q")
_DIGEST = Struct("<Q")
_HOLDERS = tuple(tuple(rule for rule in range(RULES) if held >> rule & 1) for held in range(1 << RULES))
"""The rules whose caches hold a sample, by its ``held``."""


class Shadows(msgspec.Struct):
    """The caches and the evidence of their hits.

    ``leads[RULES * i + j]`` is the weight that rule i hit more than rule j lately, ``squares`` its square by request.

        Both are in units of ``unit``, which grows where older evidence would have to fade. At most RULES times the
        capacity in samples are remembered, and as many rows of samples that ended.
    """

    rows: dict[int, int] = {}  # Row of each sample, by digest of its prefix.
    digests: bytearray = msgspec.field(default_factory=bytearray)
    lasts: bytearray = msgspec.field(default_factory=bytearray)
    codes: bytearray = msgspec.field(default_factory=bytearray)
    weights: bytearray = msgspec.field(default_factory=bytearray)
    held: bytearray = msgspec.field(
        default_factory=bytearray
    )  # A bit for each rule whose cache has the sample; 0: it ended.
    came: float = 0.0  # Weight of the samples since the caches began to evict last.
    total: float = 0.0  # Weight of all samples that have not ended.
    turn: int = RULES  # The rule that is to evict next; RULES is none.
    hits: dict[int, float] = {}  # Weight hit by the present request, by the ``held`` of its samples.
    leads: list[float] = msgspec.field(default_factory=lambda: [0.0] * _PAIRS)
    squares: list[float] = msgspec.field(default_factory=lambda: [0.0] * _PAIRS)
    unit: float = 1.0  # Weight of evidence of a hit now.
    turnover_s: float = 1.0  # Turnover of the cache, rounded to a power of two.
    is_full: bool = False  # Whether a sample was evicted so far.

    def enter(self, digest: int, last: float, code: int, weight: float) -> None:
        """Enter a prefix that was used and has no sample into all caches."""
        self.rows[digest] = len(self.held)
        self.digests += _DIGEST.pack(digest)
        self.lasts += _FLOAT.pack(last)
        self.codes += _WHOLE.pack(code)
        self.weights += _FLOAT.pack(weight)
        self.held.append(_ALL)
        self.came += weight
        self.total += weight

    def changed(self, digest: int, code: int) -> None:
        """Note changed features of a prefix; one that is not sampled is ignored."""
        row = self.rows.get(digest)
        if row is not None:
            _WHOLE.pack_into(self.codes, 8 * row, code)

    def reused(self, digest: int) -> None:
        """Note the reuse of a prefix, which ends its sample with a hit of all caches that hold it."""
        row = self.rows.pop(digest, None)
        if row is not None:
            held = self.held[row]
            weight = _FLOAT.unpack_from(self.weights, 8 * row)[0]
            self.hits[held] = self.hits.get(held, 0.0) + weight
            self.total -= weight
            self.held[row] = 0

    def settle(self, capacity: float, now: float, law: Law, fading: float, turnover_s: float) -> bool:
        """Settle a request: fade the evidence so far, count its hits, and note whether caches are to evict.

        What was due before is evicted now. Return whether the evidence has changed. ``capacity`` is in samples' weight.
        """
        self.evict(capacity, now, law)
        self.unit /= fading
        if self.unit > _MOST_WEIGHT:
            self.leads = [lead / self.unit for lead in self.leads]
            self.squares = [square / self.unit for square in self.squares]
            self.unit = 1.0
        is_changed = bool(self.hits) and self._count()
        if len(self.held) > 2 * len(self.rows) + _SPARE:
            self._drop_ended()
        if self.turn == RULES and self.came >= _slack(capacity) and self.total > capacity:
            self.turn, self.came = 0, 0.0
            if not self.turnover_s / 2 < turnover_s < 2 * self.turnover_s:
                self.turnover_s = 2.0 ** round(log2_one(max(turnover_s, 1e-9)))
        return is_changed

    def evict(self, capacity: float, now: float, law: Law) -> bool:
        """Let caches evict what is too much, if that is due: all of them, or one of large ones; return whether any did.

        ``capacity`` is in samples' weight.
        """
        if self.turn == RULES:
            return False
        while self.turn < RULES:
            self._evict(self.turn, capacity, _slack(capacity), now, law)
            self.turn += 1
            if len(self.held) > SMALL:
                break
        return True

    def lead(self, one: int, other: int) -> tuple[float, float]:
        """Return the weight that one rule hit more than another lately, and the sum of its squares by request."""
        place = RULES * one + other
        return self.leads[place] / self.unit, self.squares[place] / self.unit

    def _count(self) -> bool:
        by_rule = [0.0] * RULES
        for held, count in self.hits.items():
            if held != _ALL:  # Hits of all rules distinguish none.
                for rule in _HOLDERS[held]:
                    by_rule[rule] += count
        self.hits = {}
        if not any(by_rule):
            return False
        for one, hits in enumerate(by_rule):
            for other in range(one):
                lead = hits - by_rule[other]
                if lead:
                    weighted = self.unit * lead
                    self.leads[RULES * one + other] += weighted
                    self.leads[RULES * other + one] -= weighted
                    self.squares[RULES * one + other] += weighted * lead
                    self.squares[RULES * other + one] += weighted * lead
        return True

    def _drop_ended(self) -> None:
        """Remove the rows of samples that ended."""
        kept = np.flatnonzero(np.frombuffer(self.held, np.uint8))
        for column in (self.digests, self.lasts, self.codes, self.weights):
            left = np.frombuffer(column, np.int64)[kept].tobytes()
            column[:] = left
        self.held = bytearray(np.frombuffer(self.held, np.uint8)[kept].tobytes())
        self.rows = dict(zip(np.frombuffer(self.digests, np.uint64).tolist(), range(len(kept)), strict=True))

    def _evict(self, rule: int, capacity: float, slack: float, now: float, law: Law) -> None:
        # A few dozen samples, six times per request: methods of arrays cost less than functions of them.
        held = np.frombuffer(self.held, np.uint8)
        (its,) = (held & (1 << rule)).nonzero()
        weights = np.frombuffer(self.weights)[its]
        surplus = float(weights.sum()) - capacity
        if surplus <= 0:
            return
        self.is_full = True
        lasts, codes = np.frombuffer(self.lasts, np.float64)[its], np.frombuffer(self.codes, np.int64)[its]
        if rule == LEARNED:
            keys = score(LEARNED, now, lasts, codes, law)
        else:
            keys = order_keys(rule, lasts, codes, self.turnover_s)
        gone = its[lowest(keys, weights, surplus + slack / 2)]
        held[gone] &= _ALL ^ (1 << rule)
        ended = gone[held[gone] == 0]
        self.total -= float(np.frombuffer(self.weights)[ended].sum())
        for digest in np.frombuffer(self.digests, np.uint64)[ended].tolist():
            del self.rows[digest]


def _slack(capacity: float) -> float:
    return max(capacity / SLACK_SHARE, LEAST_SLACK)


def lowest(keys: Floats, weights: Floats, wanted: float) -> Ints:
    """Return places of the lowest keys, as many as weigh ``wanted`` together; of equal keys the first."""
    # At most so many are needed, because each weighs at least 1. Their values do not depend on a machine's partition.
    count = min(int(wanted) + 1, len(keys))
    parted = keys.copy()
    parted.partition(count - 1)
    (near,) = (keys <= parted[count - 1]).nonzero()
    order: Ints = near[keys[near].argsort(kind="stable")]
    return order[: int(weights[order].cumsum().searchsorted(wanted, side="left")) + 1]
