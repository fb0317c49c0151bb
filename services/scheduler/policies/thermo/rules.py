"""The rankings that the default policy chooses among: the law that it has learned, and rules that need no learning.

Each simple rule is right for some workloads from the first request on: recency where whoever comes back comes back
soon, frequency where every prefix has a popularity of its own, and frequency with the newest first ("rounds") where
everything is asked for in turn. What was passed by (see :class:`thermo.record.Record`) comes before all else with
each of them. Frequency is counted across evictions, as in HotPrefix (3.3.1).

The simple scores are sums and quotients of doubles, which every machine rounds alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from services.scheduler.policies.thermo.law import COUNT_SHIFT, PACES, PASSED_SHIFT, Law

if TYPE_CHECKING:
    from services.scheduler.policies.thermo.samples import Floats, Ints

LEARNED, RECENCY, FREQUENCY, ROUNDS = range(4)
RULES = 4
MOST_USES = 2**15 - 1
_TICKS_PER_S = 1000.0
_USE = 2.0**37  # Ticks that one use more outweighs: four years. With the uses they still fit a double exactly.
_PASSED = (PACES - 1) << PASSED_SHIFT
_NO_LAW = Law()


def score(rule: int, now: float, lasts: Floats, codes: Ints, law: Law) -> Floats:
    """Of prefixes that were used at ``lasts`` (policy seconds) and have these codes; the least goes first."""
    if rule == LEARNED:
        return law.score(now - lasts, codes)
    is_passed = (codes & _PASSED) > 0
    if rule == RECENCY:
        return np.where(is_passed, 0.5, 1.0) / (1.0 + np.maximum(now - lasts, 0.0))
    ticks = np.floor(lasts * _TICKS_PER_S)
    uses = np.where(is_passed, 0, codes >> COUNT_SHIFT) * _USE
    return uses + ticks if rule == FREQUENCY else uses + (_USE - ticks)


def score_one(rule: int, now: float, last: float, code: int, law: Law) -> float:
    """The same as :func:`score` for one prefix, without the cost of arrays."""
    if rule == LEARNED:
        return law.score_one(now - last, code)
    is_passed = code & _PASSED > 0
    if rule == RECENCY:
        return (0.5 if is_passed else 1.0) / (1.0 + max(now - last, 0.0))
    ticks = float(int(last * _TICKS_PER_S))
    uses = 0.0 if is_passed else (code >> COUNT_SHIFT) * _USE
    return uses + ticks if rule == FREQUENCY else uses + (_USE - ticks)


def fixed_key(rule: int, last: float, code: int) -> float:
    """Of a simple rule: in the order of its scores, nearly so for recency, and the same at all times."""
    return last if rule == RECENCY else score_one(rule, last, last, code, _NO_LAW)
