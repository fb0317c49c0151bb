"""Powers and logarithms that are the same to the bit on every machine.

Those of numpy and the C library depend on the processor's instructions and on the library's version by the last bit.
These are made of additions, multiplications, divisions and roundings alone, one after the other, and of changes of the
exponent. IEEE 754 defines all of these to the bit. They are within 2 units in the last place of the true value.
"""

from __future__ import annotations

from math import frexp, ldexp

import numpy as np

from services.scheduler.policies.thermo.samples import Floats, Ints

_LN2 = 0.6931471805599453
_LN2_HIGH = 0.693147180369123816490  # Its first 32 bits: products with exponents are exact.
_LN2_LOW = 1.90821492927058770002e-10
_HALF_ROOT = 0.7071067811865476
_MOST = 746.0  # From here on e**-x is 0.

_EXPONENTIAL = [1 / 6227020800, 1 / 479001600, 1 / 39916800, 1 / 3628800, 1 / 362880, 1 / 40320, 1 / 5040, 1 / 720,
                1 / 120, 1 / 24, 1 / 6, 0.5, 1.0]  # fmt: skip
"""Coefficients of r**13 down to r in exp(r) - 1; the rest is below half a unit for |r| up to half of ln 2."""

_ARTANH = [2 / power for power in range(23, 0, -2)]
"""Coefficients of f**23 down to f in log((1 + f) / (1 - f)); the rest is below half a unit for f up to 0.172."""


def exp2(x: Floats) -> Floats:
    """Return 2**x, float64 in the shape of ``x``; whole powers are exact."""
    exponent = np.rint(x)
    return _scaled(1.0 + _below_one((x - exponent) * _LN2), exponent)


def decay(x: Floats) -> tuple[Floats, Floats]:
    """Return e**-x and 1 - e**-x for ``x`` of at least 0 (float64), the latter exact for small x, too."""
    x = np.minimum(x, _MOST)
    exponent = np.rint(x / -_LN2)
    rest = -x - exponent * _LN2_HIGH - exponent * _LN2_LOW
    left = _below_one(rest)
    power = np.ldexp(1.0, exponent.astype(np.int32))
    return _scaled(1.0 + left, exponent), (1.0 - power) - _scaled(left, exponent)


def log2(x: Floats) -> Floats:
    """Return the binary logarithm of positive numbers (float64); of powers of two it is exact."""
    mantissa, exponent = np.frexp(x)
    is_small = mantissa < _HALF_ROOT
    mantissa = np.where(is_small, 2.0 * mantissa, mantissa)
    f = (mantissa - 1.0) / (mantissa + 1.0)
    square = f * f
    total = np.zeros_like(f)
    for coefficient in _ARTANH:
        total = total * square + coefficient
    return np.asarray(total * f / _LN2 + (exponent - is_small))


def exp2_one(x: float) -> float:
    """:func:`exp2` of one number, to the same bit, without the cost of arrays."""
    exponent = round(x)
    rest = (x - exponent) * _LN2
    total = 0.0
    for coefficient in _EXPONENTIAL:
        total += coefficient
        total *= rest
    return ldexp(1.0 + total, exponent)


def log2_one(x: float) -> float:
    """:func:`log2` of one number, to the same bit, without the cost of arrays."""
    mantissa, exponent = frexp(x)
    is_small = mantissa < _HALF_ROOT
    if is_small:
        mantissa *= 2.0
    f = (mantissa - 1.0) / (mantissa + 1.0)
    square = f * f
    total = 0.0
    for coefficient in _ARTANH:
        total = total * square + coefficient
    return total * f / _LN2 + (exponent - is_small)


def _below_one(rest: Floats) -> Floats:
    """Return exp(rest) - 1 for numbers at most half of ln 2 away from 0."""
    total = np.zeros_like(rest)
    for coefficient in _EXPONENTIAL:
        total += coefficient
        total *= rest
    return total


def _scaled(values: Floats, exponent: Floats | Ints) -> Floats:
    return np.asarray(np.ldexp(values, exponent.astype(np.int32)))
