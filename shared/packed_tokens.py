"""Token ids in their form on the wire, in place of a list: 130,000 of them are one copy and not as many objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np

TOKEN_BYTES = 4


class PackedTokens(Sequence[int]):
    """An immutable sequence of ids in [-2**31, 2**31). ``packed`` has them as little-endian int32."""

    __slots__ = ("packed",)

    def __init__(self, packed: bytes = b"") -> None:
        """Wrap ``packed``, little-endian int32, without a copy; its length is not checked."""
        self.packed = packed

    @classmethod
    def of(cls, tokens: Sequence[int]) -> PackedTokens:
        """Return the same ids, packed."""
        return tokens if isinstance(tokens, PackedTokens) else cls(np.asarray(tokens, dtype="<i4").tobytes())

    @classmethod
    def joined(cls, parts: Iterable[Sequence[int]]) -> PackedTokens:
        """Return all parts, concatenated."""
        return cls(b"".join([cls.of(part).packed for part in parts]))

    def bounds(self) -> tuple[int, int]:
        """Return the least and the greatest id. Raises ValueError for an empty sequence."""
        array = self._array()
        return int(array.min()), int(array.max())

    def tolist(self) -> list[int]:
        """Return the ids as a list of Python's ints."""
        ids: list[int] = self._array().tolist()
        return ids

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> PackedTokens: ...

    def __getitem__(self, place: int | slice) -> int | PackedTokens:
        """Return the id at a place, or the ids of a slice, copied."""
        found = self._array()[place]
        return PackedTokens(found.tobytes()) if isinstance(place, slice) else int(found)

    def __add__(self, other: Sequence[int]) -> PackedTokens:
        """Return both sequences, concatenated and packed."""
        return PackedTokens.joined((self, other))

    def __len__(self) -> int:
        """Return the number of ids."""
        return len(self.packed) // TOKEN_BYTES

    def __iter__(self) -> Iterator[int]:
        """Return an iterator over Python's ints, all of them unpacked at once."""
        return iter(self.tolist())

    def __eq__(self, other: object) -> bool:
        """Return whether the other is a sequence of the same ids, packed or not."""
        if isinstance(other, PackedTokens):
            return self.packed == other.packed
        return isinstance(other, Sequence) and len(other) == len(self) and self.tolist() == list(other)

    def __hash__(self) -> int:
        """Return the hash of the packed bytes; an equal tuple has another."""
        return hash(self.packed)

    def __repr__(self) -> str:
        """Return the class's name with a list of all ids."""
        return f"PackedTokens({self.tolist()})"

    def _array(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        return np.frombuffer(self.packed, dtype="<i4")
