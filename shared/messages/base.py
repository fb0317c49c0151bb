"""The base of every message: a frozen, tagged, keyword-only msgspec struct.

Rules that keep recordings readable across releases: a new field gets a default, the type of a field never
changes, and raw bytes stop at the codec. Token ids and page numbers travel as packed little-endian int32
(:func:`pack_int32`), which is compact and lets numpy map them without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from shared.packed_tokens import PackedTokens


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True, gc=False):
    """Base class; the class name is the tag on the wire.

    Messages refer to values and to other messages, never back, so the cyclic collector need not scan them: reference
    counts free them all.
    """


def pack_int32(values: Sequence[int] | Iterable[int] | np.ndarray) -> bytes:
    """Return integers in [-2**31, 2**31) packed as little-endian int32."""
    if isinstance(values, PackedTokens):
        return values.packed
    if not isinstance(values, np.ndarray):
        values = list(values)
    return np.asarray(values, dtype="<i4").tobytes()


def unpack_int32(packed: bytes) -> list[int]:
    """Return the integers of packed little-endian int32."""
    unpacked: list[int] = np.frombuffer(packed, dtype="<i4").tolist()
    return unpacked


def count_int32(packed: bytes) -> int:
    """Return the number of integers in ``packed``."""
    return len(packed) // 4
