"""A rate learned from what was observed, forgetting exponentially: bytes of a link, or tokens of a projection.

HCache profiles a platform once, offline (4.1.2). A disk that wears or a link that others use changes, and a plan made
for what it was is late; so every transfer that ends is an observation. The sums of amounts and of times decay with
each observation that is added, so a long transfer counts for more than a short one and the last ten for most.
"""

from __future__ import annotations

from math import inf

import msgspec

_MEMORY = 0.9
"""Weight of all observations so far when another comes."""

_MOST_SURPRISE = 8.0
"""An observation so many times off what is known counts as this far off: a pause of the machine is no new rate."""

_EXPECTING = 3
"""Observations before anything is expected."""


class Rate(msgspec.Struct):
    """Decayed sums: plain data, part of a snapshot."""

    observations: int = 0
    amount: float = 0.0
    elapsed_us: float = 0.0


def note(rate: Rate, amount: float, elapsed_us: float) -> None:
    """So much took so long. What cannot be is ignored. Mutates."""
    if not 0 < amount < inf or not 0 < elapsed_us < inf:
        return
    if rate.observations >= _EXPECTING:
        expected = amount * rate.elapsed_us / rate.amount
        elapsed_us = min(max(elapsed_us, expected / _MOST_SURPRISE), expected * _MOST_SURPRISE)
    rate.observations += 1
    rate.amount = rate.amount * _MEMORY + amount
    rate.elapsed_us = rate.elapsed_us * _MEMORY + elapsed_us


def per_us(rate: Rate, unmeasured: float) -> float:
    """Amount a microsecond, or ``unmeasured`` before the first observation. Does not mutate."""
    return rate.amount / rate.elapsed_us if rate.observations else unmeasured
