"""One number in [0, 1) for each (seed, output position): the only randomness of sampling.

It is counter-based: nothing is carried from token to token, so a request that moves to another worker, or is
preempted and resumed, draws the same numbers. The hash is SplitMix64 (Steele, Lea and Flood, "Fast Splittable
Pseudorandom Number Generators", OOPSLA 2014): the stream that the mixed seed starts, entered at step
``position + 1``.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """Return a multiple of 2**-53 in [0, 1). ``seed`` is taken modulo 2**64, so negative ones are fine."""
    start = _mix(seed & _MASK)  # Neighbouring seeds must not give shifted copies of one stream.
    return (_mix((start + (position + 1) * _GAMMA) & _MASK) >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
