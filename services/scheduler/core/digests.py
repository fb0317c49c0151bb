"""A 64-bit digest of a namespace and a run of tokens, extended node by node.

A polynomial in one fixed odd number, modulo 2**64: the digest of a prefix does not depend on how the tree has cut
it into nodes, and going on from a parent costs only the child's own tokens. It is no cryptographic hash; where
a wrong answer would be a wrong token, page identities decide (see :mod:`identities`).
"""

from __future__ import annotations

import numpy as np

_BASE = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_BLOCK = 4096

_POWERS = np.ones(_BLOCK, dtype=np.uint64)
for _index in range(1, _BLOCK):
    _POWERS[_index] = (int(_POWERS[_index - 1]) * _BASE) & _MASK
_POWERS = _POWERS[::-1].copy()


def root_digest(namespace: str) -> int:
    """The digest of no tokens in a namespace."""
    digest = 0xCBF29CE484222325
    for byte in namespace.encode():
        digest = ((digest ^ byte) * 0x100000001B3) & _MASK
    return digest


def extend(digest: int, tokens: bytes) -> int:
    """The digest after these packed int32 tokens more."""
    values = np.frombuffer(tokens, dtype="<u4").astype(np.uint64) + np.uint64(1)
    for start in range(0, len(values), _BLOCK):
        block = values[start : start + _BLOCK]
        tail = int(np.dot(block, _POWERS[-len(block) :]))
        digest = (digest * pow(_BASE, len(block), 2**64) + tail) & _MASK
    return digest
