"""Token ids as messages carry them, in the place of a list: 130,000 of them are one copy and not as many objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np

TOKEN_BYTES = 4


class PackedTokens(Sequence[int]):
    """Ids in [-2**31, 2**31), never changed. ``packed`` has them as little-endian int32."""

    __slots__ = ("packed",)

    def __init__(self, packed: bytes = b"") -> None:
        self.packed = packed

    @classmethod
    def of(cls, tokens: Sequence[int]) -> PackedTokens:
        """Return the same ids, packed."""
        return tokens if isinstance(tokens, PackedTokens) else cls(np.asarray(tokens, dtype="<i4").tobytes())

    @classmethod
    def joined(cls, parts: Iterable[Sequence[int]]) -> PackedTokens:
        """All parts, one behind the other."""
        return cls(b"".join([cls.of(part).packed for part in parts]))

    def bounds(self) -> tuple[int, int]:
        """Return the least id and the greatest. Raises ValueError where there are none."""
        array = self._array()
        return int(array.min()), int(array.max())

    def tolist(self) -> list[int]:
        """Return the ids as integers of Python."""
        ids: list[int] = self._array().tolist()
        return ids

    @overload
    def __getitem__(self, place: int) -> int: ...

    @overload
    def __getitem__(self, place: slice) -> PackedTokens: ...

    def __getitem__(self, place: int | slice) -> int | PackedTokens:
        found = self._array()[place]
        return PackedTokens(found.tobytes()) if isinstance(place, slice) else int(found)

    def __add__(self, other: Sequence[int]) -> PackedTokens:
        return PackedTokens.joined((self, other))

    def __len__(self) -> int:
        return len(self.packed) // TOKEN_BYTES

    def __iter__(self) -> Iterator[int]:
        return iter(self.tolist())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PackedTokens):
            return self.packed == other.packed
        return isinstance(other, Sequence) and len(other) == len(self) and self.tolist() == list(other)

    def __hash__(self) -> int:
        return hash(self.packed)

    def __repr__(self) -> str:
        return f"PackedTokens({self.tolist()})"

    def _array(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        return np.frombuffer(self.packed, dtype="<i4")
