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

from shared.errors import CodecError

_HEAD = Struct("<IB")
_HALF_BITS, _HALF_BYTES = 16, 2
_BYTE_BITS = 8

# Whole bytes objects are taken apart and put together, because a message of a short prompt is nearly all of such work:
# its first call in milliseconds takes a third of what arrays take. Planes are read as numbers written in base 2.
_BELOW = tuple(bytes(range(1 << plane)) for plane in range(_BYTE_BITS))
"""By plane: the bytes that have neither its bit nor a higher one."""
_DIGITS = tuple(bytes(b"01"[byte >> plane & 1] for byte in range(256)) for plane in range(_BYTE_BITS))
"""By plane: for each byte, its bit as the digit 0 or 1."""
_VALUES = tuple(bytes(1 << plane if byte == ord("1") else 0 for byte in range(256)) for plane in range(_BYTE_BITS))
"""By plane: for each digit, a byte that has only its bit."""


def compacted(packed: bytes) -> bytes:
    """Return the compact form of ids packed as int32, of any value."""
    count = len(packed) // 4
    low = bytearray(count * _HALF_BYTES)
    low[0::2], low[1::2] = packed[0::4], packed[1::4]
    above = packed[2::4], packed[3::4]
    highest = _planes_of(above[1])
    planes = _BYTE_BITS + highest if highest else _planes_of(above[0])
    bits = [_packed_plane(above[plane // _BYTE_BITS], plane % _BYTE_BITS) for plane in range(planes)]
    return b"".join((_HEAD.pack(count, planes), low, *bits))


def expanded(compact: bytes) -> bytes:
    """Return the ids of a compact form, packed int32. Raises CodecError where its length does not fit its head."""
    count, planes = _head(compact)
    plane_bytes = -(-count // 8)
    start = _HEAD.size + count * _HALF_BYTES
    if planes > _HALF_BITS or len(compact) != start + planes * plane_bytes:
        raise CodecError(f"{len(compact)} bytes are no compact form of {count} tokens with {planes} planes")
    packed = bytearray(count * 4)
    packed[0::4], packed[1::4] = compact[_HEAD.size : start : 2], compact[_HEAD.size + 1 : start : 2]
    for first in range(0, planes if count else 0, _BYTE_BITS):
        column = 0
        for plane in range(first, min(first + _BYTE_BITS, planes)):
            at = start + plane * plane_bytes
            column |= _unpacked_plane(compact[at : at + plane_bytes], count, plane % _BYTE_BITS)
        packed[2 + first // _BYTE_BITS :: 4] = column.to_bytes(count, "little")
    return bytes(packed)


def count_compact(compact: bytes) -> int:
    """Return the number of ids by a compact form's head, without reading them. Raises CodecError without a head."""
    return _head(compact)[0]


def _planes_of(column: bytes) -> int:
    """Return how many bits the greatest of these bytes takes."""
    planes = 0
    while column and (column := column.translate(None, _BELOW[planes])):
        planes += 1
        if planes == _BYTE_BITS:
            break
    return planes


def _packed_plane(column: bytes, plane: int) -> bytes:
    """Return bit ``plane`` of each byte, the first one in the lowest bit of the first byte."""
    digits = column.translate(_DIGITS[plane])[::-1]
    return int(digits, 2).to_bytes(-(-len(column) // 8), "little")


def _unpacked_plane(bits: bytes, count: int, plane: int) -> int:
    """Return ``count`` bytes with these as their bit ``plane``, as a little-endian number."""
    digits = format(int.from_bytes(bits, "little"), f"0{count}b").encode()[: -count - 1 : -1]
    return int.from_bytes(digits.translate(_VALUES[plane]), "little")


def _head(compact: bytes) -> tuple[int, int]:
    if len(compact) < _HEAD.size:
        raise CodecError(f"{len(compact)} bytes are no compact form of tokens")
    count, planes = _HEAD.unpack_from(compact)
    return count, planes
