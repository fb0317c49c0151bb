"""A 64-bit digest of a namespace and a run of tokens, extended node by node.

A polynomial in one fixed odd number, modulo 2**64: the digest of a prefix does not depend on how the tree has cut
it into nodes, and going on from a parent costs only the child's own tokens. It is no cryptographic hash; where
a wrong answer would be a wrong token, page identities decide (see :mod:`chunk_run`).
"""

from __future__ import annotations

from operator import mul
from struct import Struct

import numpy as np
from numpy.typing import NDArray

MULTIPLIER = 0x9E3779B97F4A7C15
_SECOND = 0xBF58476D1CE4E5B9
_THIRD = 0x94D049BB133111EB
_MASK = 2**64 - 1
_BLOCK = 4096

_POWERS = np.ones(_BLOCK + 1, dtype=np.uint64)
for _index in range(1, _BLOCK + 1):
    _POWERS[_index] = (int(_POWERS[_index - 1]) * MULTIPLIER) & _MASK
# Every token counts as one more than its number, so that zeros count too; the ones add up to a constant for each
# length.
_ONES = [0, *np.cumsum(_POWERS[:_BLOCK], dtype=np.uint64).tolist()]
_SHIFTS = _POWERS.tolist()
_POWERS = _POWERS[:_BLOCK][::-1].copy()
# Most digested spans are a node's first tokens, or a question: so few cost less without arrays.
_FEW = 64
_UNPACKS = [Struct(f"<{count}I").unpack for count in range(_FEW + 1)]
_POWERS_OF_FEW = [tuple(_POWERS[_BLOCK - count :].tolist()) for count in range(_FEW + 1)]


def root_digest(namespace: str) -> int:
    """Return the digest of an empty prefix in a namespace."""
    digest = 0xCBF29CE484222325
    for byte in namespace.encode():
        digest = ((digest ^ byte) * 0x100000001B3) & _MASK
    return digest


def extend(digest: int, tokens: bytes) -> int:
    """Return the digest after further ``tokens``, packed little-endian int32."""
    count = len(tokens) // 4
    if count <= _FEW:
        few: int = (
            digest * _SHIFTS[count] + sum(map(mul, _UNPACKS[count](tokens), _POWERS_OF_FEW[count])) + _ONES[count]
        )
        return few & _MASK
    values = np.frombuffer(tokens, dtype="<u4")
    start = 0
    if count >= _BLOCK:
        start = count // _BLOCK * _BLOCK
        # Casts a piece at a time, so that no copy of all tokens as 64-bit numbers is made.
        for block in np.einsum("ij,j->i", values[:start].reshape(-1, _BLOCK), _POWERS).tolist():
            digest = (digest * _SHIFTS[_BLOCK] + block + _ONES[_BLOCK]) & _MASK
    length = count - start
    if length:
        rest = int(values[start:].astype(np.uint64).dot(_POWERS[_BLOCK - length :]))
        digest = (digest * _SHIFTS[length] + rest + _ONES[length]) & _MASK
    return digest


def mix(value: int) -> int:
    """Return a 64-bit number that looks unrelated to ``value``; a permutation (splitmix64).

    The low bits of a digest depend on the low bits of the tokens only; those of the result depend on the whole value.
    """
    value = (value + MULTIPLIER) & _MASK
    value = ((value ^ (value >> 30)) * _SECOND) & _MASK
    value = ((value ^ (value >> 27)) * _THIRD) & _MASK
    return value ^ (value >> 31)


def mix_all(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return :func:`mix` of each value, in an uint64 array of the same shape."""
    values = values + np.uint64(MULTIPLIER)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_SECOND)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_THIRD)
    return values ^ (values >> np.uint64(31))
