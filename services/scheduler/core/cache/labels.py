"""Tokens of a node in three bytes each, where all of them are below 2**24, as those of every real vocabulary are.

Prompts and messages have tokens as packed int32, a quarter of whose bytes is zero; more than half of the memory of a
tree is tokens. Longer spans of the main tree keep them narrow: a prompt is narrowed as far as a match gets, once, and
compared in place. A short span, and one with a token that needs more, keeps int32 and is told so (``Rare.is_wide``).
"""

from __future__ import annotations

import numpy as np

from shared.ids import TOKEN_BYTES

NARROW_BYTES = 3
"""Of a token in a narrow label, little-endian."""

LEAST_NARROWED = 256
"""Tokens from which on a span is kept narrow. Shorter ones have a quarter of all bytes, and cause most of the work."""

_LEAST_WIDE = 1 << 8 * NARROW_BYTES
_NUMBER = np.dtype("<u4")
_NONE = np.empty(0, _NUMBER)


def label_of(tokens: bytes, *, is_kept: bool = True) -> tuple[bytes, bool]:
    """The label of a node with these tokens (packed int32), and whether it is wide; it is, unless it is to be kept."""
    narrowed = narrow(tokens) if is_kept and len(tokens) >= LEAST_NARROWED * TOKEN_BYTES else None
    return (tokens, True) if narrowed is None else (narrowed, False)


def narrow(tokens: bytes) -> bytes | None:
    """These packed int32 tokens in NARROW_BYTES each; None where there is one that needs more."""
    narrowed = narrow_behind(tokens, 0, len(tokens))
    return None if narrowed is None else bytes(memoryview(narrowed)[:-1])


def narrow_behind(tokens: bytes, start: int, end: int) -> bytearray | None:
    """The same of ``tokens[start:end]`` (byte offsets), with a byte more behind them; what is made is not copied."""
    count = (end - start) // TOKEN_BYTES
    numbers = np.frombuffer(tokens, _NUMBER, count, start) if count else _NONE
    if np.maximum.reduce(numbers, initial=0) >= _LEAST_WIDE:
        return None
    narrowed = bytearray(NARROW_BYTES * count + 1)
    # In order: the lowest byte of each number is written over the highest one, zero, of the number before.
    np.ndarray(count, _NUMBER, narrowed, 0, (NARROW_BYTES,))[...] = numbers
    return narrowed


def widened(label: bytes) -> bytes:
    """Undo :func:`narrow`."""
    numbers = np.ndarray(len(label) // NARROW_BYTES, _NUMBER, label + b"\0", 0, (NARROW_BYTES,))
    return (numbers & (_LEAST_WIDE - 1)).tobytes()


def tokens_of(label: bytes, start: int, end: int, *, is_wide: bool) -> bytes:
    """Tokens from ``start`` to ``end`` of a label, as packed int32."""
    if is_wide:
        return label[start * TOKEN_BYTES : end * TOKEN_BYTES]
    return widened(label[start * NARROW_BYTES : end * NARROW_BYTES])
