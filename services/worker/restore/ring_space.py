"""Allocation of a ring's bytes: contiguous areas, taken at the front and given back in the same order. Pure."""

from __future__ import annotations

from collections import deque

from shared.errors import InvariantViolated


class RingSpace:
    """Areas in use in a ring. None wraps around: the rest at the end of the ring is skipped and comes back with it."""

    def __init__(self, capacity_bytes: int) -> None:
        """Begin with all of ``capacity_bytes`` free."""
        self._capacity = capacity_bytes
        self._areas: deque[tuple[int, int]] = deque()  # (start, end), oldest first.

    @property
    def largest(self) -> int:
        """Bytes of the largest area that can be taken now."""
        if not self._areas:
            return self._capacity
        oldest, newest = self._areas[0][0], self._areas[-1][1]
        if newest > oldest:
            return max(self._capacity - newest, oldest)
        return oldest - newest

    def take(self, nbytes: int) -> int | None:
        """Return the start of a new area, or None when there is no room."""
        if nbytes < 1 or nbytes > self.largest:
            return None
        start = self._areas[-1][1] if self._areas else 0
        wrapped = bool(self._areas) and start <= self._areas[0][0]
        if not wrapped and start + nbytes > self._capacity:
            start = 0
        self._areas.append((start, start + nbytes))
        return start

    def give_back_oldest(self) -> None:
        """Give back the oldest. Raises InvariantViolated if nothing is in use."""
        if not self._areas:
            raise InvariantViolated("a ring in which nothing is in use cannot get anything back")
        self._areas.popleft()
