"""Token ids in fewer bytes than packed int32: their low halves, and the few bits above those.

A vocabulary has 2**14 to 2**18 entries, so an id takes 2 to 2.25 bytes instead of 4. The form depends on the ids alone,
not on a library's version, because replay and standbys compare bytes. It is, little-endian::

    0    number of ids, uint32
    4    planes, uint8: bits above the low half that any id has, 0 to 16
    5    the low 16 bits of each id, uint16
    ...  for each plane, from bit 16 on: one bit an id, the first in the lowest bit of the first byte
"""

from __future__ import annotations

from struct import Struct

import numpy as np

from shared.errors import CodecError

_HEAD = Struct("<IB")
_HALF_BITS, _HALF_BYTES = 16, 2


def compacted(packed: bytes) -> bytes:
    """Return the compact form of ids packed as int32, of any value."""
    halves = np.frombuffer(packed, dtype="<u2").reshape(-1, 2)
    low, high = halves[:, 0], halves[:, 1]
    planes = int(high.max()).bit_length() if len(halves) else 0
    bits = [np.packbits((high >> plane) & 1, bitorder="little").tobytes() for plane in range(planes)]
    return b"".join((_HEAD.pack(len(halves), planes), low.tobytes(), *bits))


def expanded(compact: bytes) -> bytes:
    """Return the ids of a compact form, packed int32. Raises CodecError where its length does not fit its head."""
    count, planes = _head(compact)
    plane_bytes = -(-count // 8)
    start = _HEAD.size + count * _HALF_BYTES
    if planes > _HALF_BITS or len(compact) != start + planes * plane_bytes:
        raise CodecError(f"{len(compact)} bytes are no compact form of {count} tokens with {planes} planes")
    halves = np.zeros((count, 2), dtype="<u2")
    halves[:, 0] = np.frombuffer(compact, dtype="<u2", count=count, offset=_HEAD.size)
    for plane in range(planes):
        bits = np.frombuffer(compact, dtype=np.uint8, count=plane_bytes, offset=start + plane * plane_bytes)
        halves[:, 1] |= np.unpackbits(bits, count=count, bitorder="little").astype("<u2") << plane
    return halves.tobytes()


def count_compact(compact: bytes) -> int:
    """Return the number of ids by a compact form's head, without reading them. Raises CodecError without a head."""
    return _head(compact)[0]


def _head(compact: bytes) -> tuple[int, int]:
    if len(compact) < _HEAD.size:
        raise CodecError(f"{len(compact)} bytes are no compact form of tokens")
    count, planes = _HEAD.unpack_from(compact)
    return count, planes
