"""Exact hotness of prefixes: the scheduler's filter without its collisions."""

from __future__ import annotations

from collections.abc import Sequence

from shared.messages.cell_events import CellConfig


class ExactHotness:
    """Frequency and clock of all prefixes so far, without collisions; only the clock is bounded."""

    def __init__(self, *, max_age: int = 255, aging_requests: int = CellConfig().aging_requests) -> None:
        """Begin with no prefixes; the clock of a prefix is ``max_age`` at its last use.

        It goes down by 1, to 0 at the least, each time that ``aging_requests`` requests were admitted.
        """
        self.ages = 0
        self._max_age = max_age
        self._aging_requests = aging_requests
        self._requests = 0
        self._known: dict[int, tuple[int, int]] = {}  # Frequency, and ``ages`` at the last use.

    def lookup(self, digest: int) -> tuple[int, int]:
        """Return (frequency, clock) of a prefix; (0, 0) for an unknown one."""
        frequency, used_at = self._known.get(digest, (0, 0))
        return frequency, max(0, self._max_age - (self.ages - used_at)) if frequency else 0

    def admitted(self, digests: Sequence[int]) -> None:
        """Record that a request reuses these prefixes, the shortest first."""
        self._requests += 1
        if self._requests % self._aging_requests == 0:
            self.ages += 1
        for above, digest in enumerate(digests):
            self.inserted(digest, above + 1)

    def inserted(self, digest: int, level: int) -> None:
        """Record that a prefix became resident; ``level`` is the number of its blocks."""
        self._known[digest] = (self._known.get(digest, (0, 0))[0] + 1, self.ages)
