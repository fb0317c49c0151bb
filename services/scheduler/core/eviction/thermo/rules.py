"""The rankings that the default policy chooses among: the law that it has learned, and simple rules that need no learning.

A simple rule is the law of some workloads: recency where whoever comes back comes back soon, frequency where each
prefix has a popularity of its own, and frequency with the newest first where everything is asked for in turn. Their
scores are sums and quotients of doubles, which every machine rounds alike.
"""

from __future__ import annotations

from services.scheduler.core.eviction.thermo.law import COUNT_SHIFT, PASSED_SHIFT, PACES, Law
from services.scheduler.core.eviction.thermo.samples import Floats, Ints

import numpy as np

LEARNED, RECENCY, FREQUENCY, ROUND = range(4)
RULES = 4
_TICKS_PER_S = 1000.0
_STEP = 2.0**37  # Ticks that one use more outweighs: four years.


def score(rule: int, now: float, lasts: Floats, codes: Ints, law: Law) -> Floats:
    """The least goes first. Of prefixes that were used at ``lasts`` and have these codes, by one rule."""
    if rule == LEARNED:
        return law.score(now - lasts, codes)
    passed = (codes >> PASSED_SHIFT) & (PACES - 1)
    if rule == RECENCY:
        return np.where(passed > 0, 0.5, 1.0) / (1.0 + np.maximum(now - lasts, 0.0))
    ticks = np.floor(lasts * _TICKS_PER_S)
    uses = np.where(passed > 0, 0, codes >> COUNT_SHIFT) * _STEP
    return uses + ticks if rule == FREQUENCY else uses + _STEP - ticks


def score_one(rule: int, now: float, last: float, code: int, law: Law) -> float:
    """The same as :func:`score` for one prefix."""
    if rule == LEARNED:
        return law.score_one(now - last, code)
    is_passed = (code >> PASSED_SHIFT) & (PACES - 1) > 0
    if rule == RECENCY:
        return (0.5 if is_passed else 1.0) / (1.0 + max(now - last, 0.0))
    ticks = float(int(last * _TICKS_PER_S))
    uses = 0.0 if is_passed else (code >> COUNT_SHIFT) * _STEP
    return uses + ticks if rule == FREQUENCY else uses + _STEP - ticks


def fixed_key(rule: int, last: float, code: int) -> float:
    """In the order of a simple rule's scores, and the same at all times."""
    return last if rule == RECENCY else score_one(rule, last, last, code, _NO_LAW)


_NO_LAW = Law()
