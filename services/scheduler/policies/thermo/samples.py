"""The window of sampled accesses that the law of reuse is fitted to, in packed columns.

A sample costs 33 bytes, in memory as in a snapshot. Times are in seconds of the policy's clock.
"""

from __future__ import annotations

from struct import Struct

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_FLOAT = Struct("<d")
_WHOLE = Struct("<q")


class Samples(msgspec.Struct):
    """Samples by row; number ``first`` is in row 0.

    ``begin`` is when the prefix was used, ``enter`` since when it is watched with these features (later than ``begin``
    if they changed in between), ``end`` when it was reused or no longer watched, or -1.
    """

    window: int = 13824  # Samples kept when a fit begins.
    first: int = 0
    begin: bytearray = msgspec.field(default_factory=bytearray)
    enter: bytearray = msgspec.field(default_factory=bytearray)
    end: bytearray = msgspec.field(default_factory=bytearray)
    is_reused: bytearray = msgspec.field(default_factory=bytearray)
    codes: bytearray = msgspec.field(default_factory=bytearray)

    def count(self) -> int:
        """Return the number of samples in the window."""
        return len(self.is_reused)

    def open(self, begin: float, enter: float, code: int) -> int:
        """Begin to watch a prefix; return the sample's number."""
        self.begin += _FLOAT.pack(begin)
        self.enter += _FLOAT.pack(enter)
        self.end += _FLOAT.pack(-1.0)
        self.is_reused.append(0)
        self.codes += _WHOLE.pack(code)
        return self.first + len(self.is_reused) - 1

    def relabel(self, number: int, code: int) -> None:
        """Correct the features of an open sample; one that has left the window is ignored."""
        if number >= self.first:
            _WHOLE.pack_into(self.codes, 8 * (number - self.first), code)

    def close(self, number: int, now: float, is_reused: bool) -> None:
        """Close the sample of a prefix that was reused, or is no longer watched (with these features)."""
        if number >= self.first:
            _FLOAT.pack_into(self.end, 8 * (number - self.first), now)
            self.is_reused[number - self.first] = is_reused

    def close_all(self, now: float) -> None:
        """Close all open samples, as no longer watched."""
        end = np.frombuffer(self.end, np.float64)
        end[end < 0] = now

    def begun(self, number: int) -> float:
        """Return when the sampled prefix was used, or -1 when the sample has left the window."""
        return float(_FLOAT.unpack_from(self.begin, 8 * (number - self.first))[0]) if number >= self.first else -1.0

    def trim(self) -> None:
        """Forget the oldest samples beyond the window."""
        surplus = len(self.is_reused) - self.window
        if surplus > 0:
            del self.begin[: 8 * surplus], self.enter[: 8 * surplus], self.end[: 8 * surplus]
            del self.codes[: 8 * surplus], self.is_reused[:surplus]
            self.first += surplus

    def ages(self, start: int, stop: int, now: float) -> tuple[Floats, Floats, Bools]:
        """Return the ages (s) at which samples in these rows began and ceased to be watched, and whether by reuse.

        Ends later than ``now`` have not happened yet.
        """
        span = stop - start
        begin = np.frombuffer(self.begin, np.float64, span, 8 * start)
        end = np.frombuffer(self.end, np.float64, span, 8 * start)
        is_over = (end >= 0) & (end <= now)
        enter = np.maximum(np.frombuffer(self.enter, np.float64, span, 8 * start) - begin, 0.0)
        leave = np.maximum(np.where(is_over, end, now) - begin, enter)
        return enter, leave, is_over & (np.frombuffer(self.is_reused, np.bool_, span, start))

    def features(self, start: int, stop: int) -> Ints:
        """Return the codes of the samples in these rows (int64, a copy)."""
        return np.frombuffer(self.codes, np.int64, stop - start, 8 * start).copy()
