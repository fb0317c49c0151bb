"""The rankings that the default policy chooses among: the law that it has learned, and rules that need no learning.

Each simple rule is right for some workloads from the first request on: recency where prefixes used again are used again
soon, frequency where every prefix has a popularity of its own, and frequency with the newest first ("rounds") where
everything is asked for in turn. Between recency and frequency lie the two that count a use for half as much after every
half-life, as LRFU does (Lee et al., IEEE ToC 50(12), 2001): where popularity lasts for a while. Half-lives are in
turnovers of the pool. A prefix that was passed by (:attr:`thermo.prefixes.Prefixes.passed`) is evicted before all
others under the three, and counts as used once under the two, unless it is one of many ways on: examples in a tree are
asked for in any order. Frequency is counted across evictions, as in HotPrefix (3.3.1).

The simple scores are sums and quotients of doubles, which every machine rounds alike.
"""

from __future__ import annotations

from functools import lru_cache
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from services.scheduler.policies.thermo.elementary import exp2, exp2_one, log2
from services.scheduler.policies.thermo.law import COUNT_SHIFT, PACES, PASSED_SHIFT, Law, rounded, rounded_one

if TYPE_CHECKING:
    from services.scheduler.policies.thermo.samples import Floats, Ints

LEARNED, RECENCY, FREQUENCY, ROUNDS, FADING, LASTING = range(6)
RULES = 6
HALF_LIVES = {FADING: 1.0, LASTING: 4.0}  # Half-lives of a use, in turnovers of the pool.
MOST_USES = 2**15 - 1
_TICKS_PER_S = 1000.0
_USE = 2.0**37  # Ticks that one use more outweighs: four years. With the uses they still fit a double exactly.
_PASSED = (PACES - 1) << PASSED_SHIFT
_PASSED_BY_ONE = 1 << PASSED_SHIFT  # The other of two ways was taken; a greater number says that there are more ways.
_NO_LAW = Law()
_MOST_COUNTED = 4095
_LOG2_USES = rounded(log2(np.maximum(np.arange(_MOST_COUNTED + 1.0), 1.0)))
_LEAST_EXPONENT = -120.0  # Powers of two that single precision holds.


def score(rule: int, now: float, lasts: Floats, codes: Ints, law: Law, turnover_s: float = 1.0) -> Floats:
    """Return scores (float64) of prefixes used at ``lasts`` (policy s) with these codes; the lowest goes first."""
    if rule == LEARNED:
        return law.score(now - lasts, codes)
    if rule in HALF_LIVES:
        half_life_s = HALF_LIVES[rule] * turnover_s
        most = np.array(_most_left(half_life_s))[codes & (PACES - 1)]
        left = np.where((codes & _PASSED) == _PASSED_BY_ONE, 1.0, np.minimum(codes >> COUNT_SHIFT, most))
        exponent = np.maximum((lasts - now) / half_life_s, _LEAST_EXPONENT)
        return rounded(left * exp2(np.minimum(exponent, 0.0)))
    is_passed = (codes & _PASSED) == _PASSED_BY_ONE
    if rule == RECENCY:
        return np.where(is_passed, 0.5, 1.0) / (1.0 + np.maximum(now - lasts, 0.0))
    ticks = np.floor(lasts * _TICKS_PER_S)
    uses = np.where(is_passed, 0, codes >> COUNT_SHIFT) * _USE
    return uses + ticks if rule == FREQUENCY else uses + (_USE - ticks)


def score_one(rule: int, now: float, last: float, code: int, law: Law, turnover_s: float = 1.0) -> float:
    """Return the same as :func:`score` for one prefix, without the cost of arrays."""
    if rule == LEARNED:
        return law.score_one(now - last, code)
    if rule in HALF_LIVES:
        half_life_s = HALF_LIVES[rule] * turnover_s
        exponent = min(max((last - now) / half_life_s, _LEAST_EXPONENT), 0.0)
        return rounded_one(_left(code, half_life_s) * exp2_one(exponent))
    is_passed = code & _PASSED == _PASSED_BY_ONE
    if rule == RECENCY:
        return (0.5 if is_passed else 1.0) / (1.0 + max(now - last, 0.0))
    ticks = float(int(last * _TICKS_PER_S))
    uses = 0.0 if is_passed else (code >> COUNT_SHIFT) * _USE
    return uses + ticks if rule == FREQUENCY else uses + (_USE - ticks)


def order_keys(rule: int, lasts: Floats, codes: Ints, turnover_s: float = 1.0) -> Floats:
    """Return keys (float64) in the order of a simple rule's scores; nearly in it for recency.

    They do not change with time while the turnover is the same.
    """
    if rule == RECENCY:
        return lasts
    if rule in HALF_LIVES:
        half_life_s = HALF_LIVES[rule] * turnover_s
        uses = _LOG2_USES[np.minimum(codes >> COUNT_SHIFT, _MOST_COUNTED)]
        uses = np.minimum(uses, np.frombuffer(_log2_most(half_life_s))[codes & (PACES - 1)])
        return np.where((codes & _PASSED) == _PASSED_BY_ONE, 0.0, uses) * half_life_s + lasts
    return score(rule, 0.0, lasts, codes, _NO_LAW)


def _left(code: int, half_life_s: float) -> float:
    """Return the faded count of all uses of a prefix at its last use, that one included."""
    if code & _PASSED == _PASSED_BY_ONE:
        return 1.0
    return min(float(code >> COUNT_SHIFT), _most_left(half_life_s)[code & (PACES - 1)])


@lru_cache(maxsize=64)
def _most_left(half_life_s: float) -> tuple[float, ...]:
    """Return, by pace, the faded count of endlessly many uses that far apart. Without a pace there is no bound.

    A pace is known by the doublings of a millisecond that it has, so the middle of each is taken.
    """
    paces_s = [0.75e-3 * 2.0 ** (bits - 1) for bits in range(1, PACES)]
    return inf, *(1 / (1 - exp2_one(-max(pace_s / half_life_s, 1e-9))) for pace_s in paces_s)


@lru_cache(maxsize=64)
def _log2_most(half_life_s: float) -> bytes:
    """Return the binary logarithms of :func:`_most_left`, float64."""
    most = np.array(_most_left(half_life_s))
    return rounded(log2(np.minimum(most, 2.0**100))).tobytes()
