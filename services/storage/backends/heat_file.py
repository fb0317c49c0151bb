"""The last note of the heats of a directory's chunks, in one small file: ten bytes a chunk.

::

    TCHEATS1, chunks (uint64), xxh3_64 of the rest (uint64)
    names [chunks] uint64, ascending: xxh3_64 of identity and geometry
    heats [chunks] float16: ``core.chunk_worth.heat_left``

It is a hint: a chunk that it does not name counts as used once, now, and a torn file is ignored.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import xxhash

from services.storage.backends import ChunkKey

MAGIC = b"TCHEATS1"
_HEAD = struct.Struct("<8sQQ")
_ENTRY_BYTES = 10


class NotedHeats:
    """The noted heats of one directory."""

    def __init__(self, names: npt.NDArray[np.uint64], heats: npt.NDArray[np.float16]) -> None:
        """Take ``names``, uint64 [chunks] in ascending order, and their ``heats``, float16 [chunks]."""
        self._names = names
        self._heats = heats

    @classmethod
    def unpack(cls, data: bytes) -> NotedHeats:
        """Return the content of :func:`pack_heats`'s bytes; empty for any others."""
        is_whole = len(data) >= _HEAD.size
        magic, count, checksum = _HEAD.unpack_from(data) if is_whole else (b"", 0, 0)
        body = data[_HEAD.size :]
        is_sound = magic == MAGIC and len(body) == count * _ENTRY_BYTES and xxhash.xxh3_64_intdigest(body) == checksum
        split = count * 8 if is_sound else 0
        return cls(np.frombuffer(body[:split], "<u8"), np.frombuffer(body[split:] if is_sound else b"", "<f2"))

    def of(self, key: ChunkKey) -> float | None:
        """Return a chunk's noted heat; None if it is not named."""
        name = _name(key)
        place = int(np.searchsorted(self._names, np.uint64(name)))
        if place == len(self._names) or int(self._names[place]) != name:
            return None
        heat = float(self._heats[place])
        return heat if np.isfinite(heat) else None


def pack_heats(heats: Mapping[ChunkKey, float]) -> bytes:
    """Return the bytes of a file with this content."""
    names = np.fromiter((_name(key) for key in heats), np.uint64, len(heats))
    order = np.argsort(names)
    most = float(np.finfo(np.float16).max)
    values = np.clip(np.fromiter(heats.values(), np.float64, len(heats)), -most, most).astype("<f2")
    body = names[order].astype("<u8").tobytes() + values[order].tobytes()
    return _HEAD.pack(MAGIC, len(heats), xxhash.xxh3_64_intdigest(body)) + body


def _name(key: ChunkKey) -> int:
    return int(xxhash.xxh3_64_intdigest(key.identity + key.geometry))
