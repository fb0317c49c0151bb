"""Checksums of the units of pages, and copies of the pages on the way: one pass, without the interpreter lock.

``page_units.c`` does both where the machine has a C compiler; else, and for units that its hash is not for, Python does
the same page by page.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from shared.errors import InvariantViolated
from shared.ids import DIGEST_BYTES
from shared.native.build import NotCompiled, announce_missing, load

MIN_HASHED_BYTES = 241
"""Shorter units take other branches of XXH3, which the C code lacks."""

_SEED_BYTES = 8

Bytes = npt.NDArray[np.uint8]
Checksums = npt.NDArray[np.uint64]

_Hash = Callable[..., None]


def hash_pages(
    source: Bytes, identities: bytes, target: Bytes | None = None, places: npt.NDArray[np.int32] | None = None
) -> Checksums:
    """Return the checksums uint64 [pages, units] of contiguous pages, uint8 [pages, units, unit_bytes].

    A checksum is the unit's xxh3_64, seeded with the low 8 bytes of its page's identity; ``identities`` has 16 bytes a
    page. With ``target``, a contiguous array of pages of this shape, page i is copied to ``target[places[i]]`` unless
    ``places[i]`` is negative. Raises InvariantViolated for places that ``target`` does not have.
    """
    pages, units, unit_bytes = source.shape
    if target is not None and places is not None:
        is_there = len(places) == pages and places.max(initial=-1) < len(target)
        if not is_there or target.shape[1:] != source.shape[1:] or not target.flags.c_contiguous:
            raise InvariantViolated(f"{pages} pages of {units} units do not fit in {target.shape} at {places}")
    native = native_hash() if unit_bytes >= MIN_HASHED_BYTES else None
    if native is None:
        return _hash_pages(source, identities, target, places)
    assert source.flags.c_contiguous
    assert len(identities) == pages * DIGEST_BYTES
    found = np.empty((pages, units), np.uint64)
    into = where = None
    if target is not None and places is not None:
        assert target.flags.writeable
        places = np.ascontiguousarray(places, np.int32)
        into, where = target.ctypes.data, places.ctypes.data
    native(source.ctypes.data, unit_bytes, units, pages, identities, found.ctypes.data, into, where)
    return found


@functools.cache
def native_hash() -> _Hash | None:
    """Return the C function, compiled and proven equal to xxhash here; None, announced, where that fails."""
    try:
        made: _Hash = load(Path(__file__).with_suffix(".c"), (), {}, {}).hash_units
    except NotCompiled:
        return None
    pointer = ctypes.c_void_p
    made.argtypes = [pointer, *[ctypes.c_int64] * 3, ctypes.c_char_p, *[pointer] * 3]  # type: ignore[attr-defined]
    made.restype = None  # type: ignore[attr-defined]
    if not _agrees(made):
        announce_missing("page_units", "its checksums differ from xxhash's")
        return None
    return made


def _agrees(native: _Hash) -> bool:
    identities = bytes(DIGEST_BYTES) + bytes(range(0xF0, 0x100))
    for unit_bytes in (MIN_HASHED_BYTES, 256, 1024, 1025, 4096, 65_536):
        source = (np.arange(4 * unit_bytes, dtype=np.uint64) * 0x9E3779B97F4A7C15 >> 56).astype(np.uint8)
        found = np.empty((2, 2), np.uint64)
        native(source.ctypes.data, unit_bytes, 2, 2, identities, found.ctypes.data, None, None)
        if not np.array_equal(found, _hash_pages(source.reshape(2, 2, unit_bytes), identities, None, None)):
            return False
    return True


def _hash_pages(
    source: Bytes, identities: bytes, target: Bytes | None, places: npt.NDArray[np.int32] | None
) -> Checksums:
    pages, units, unit_bytes = source.shape
    # Slices of one flat memoryview: an array for each unit would cost more than hashing a small one.
    flat, page_bytes, digest = source.reshape(-1).data, units * unit_bytes, xxhash.xxh3_64_intdigest
    found: list[int] = []
    for page, start in enumerate(range(0, pages * page_bytes, page_bytes)):
        seed = int.from_bytes(identities[page * DIGEST_BYTES : page * DIGEST_BYTES + _SEED_BYTES], "little")
        found += [digest(flat[at : at + unit_bytes], seed) for at in range(start, start + page_bytes, unit_bytes)]
        if target is not None and places is not None and places[page] >= 0:
            target[places[page]] = source[page]
    return np.array(found, np.uint64).reshape(pages, units)
