"""The tokens of a running request: those of its admission as they arrived, and those sampled since.

A prompt of a million tokens is neither copied nor turned into Python numbers: it stays packed as it arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt


class TokenSequence(Sequence[int]):
    """Tokens that grow at their end only, so that one thread may read while another appends."""

    __slots__ = ("_known", "_sampled")

    def __init__(self, known: npt.NDArray[np.int32] | Iterable[int]) -> None:
        """Begin with ``known``, int32 [n], which does not change."""
        self._known = known if isinstance(known, np.ndarray) else np.fromiter(known, dtype=np.int32)
        self._sampled: list[int] = []

    def __len__(self) -> int:
        """Return the number of tokens, those of the admission and the sampled ones."""
        return len(self._known) + len(self._sampled)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        """Return a token, or a list of those of a slice of step 1; a slice takes time in proportion to its length."""
        known = len(self._known)
        if isinstance(index, int):
            at = range(len(self))[index]
            return int(self._known[at]) if at < known else self._sampled[at - known]
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise ValueError("tokens are sliced one by one")
        if start >= known:
            return self._sampled[start - known : max(start, stop) - known]
        found: list[int] = self._known[start:stop].tolist()
        return found if stop <= known else found + self._sampled[: stop - known]

    def append(self, token: int) -> None:
        """Append one sampled token."""
        self._sampled.append(token)

    def first(self, count: int) -> npt.NDArray[np.int32]:
        """Return the first ``count`` of the tokens known at admission, int32, read-only."""
        return self._known[:count]
