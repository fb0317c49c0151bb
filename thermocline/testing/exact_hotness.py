"""What is remembered of prefixes, exactly: the scheduler's filter without its collisions."""

from __future__ import annotations

from collections.abc import Sequence

from shared.messages.cell_events import CellConfig


class ExactHotness:
    """Every prefix that ever was, without collisions or saturation but for the clock's bound."""

    def __init__(self, *, max_age: int = 255, aging_requests: int = CellConfig().aging_requests) -> None:
        self.ages = 0
        self._max_age = max_age
        self._aging_requests = aging_requests
        self._requests = 0
        self._known: dict[int, tuple[int, int]] = {}  # Frequency, and ``ages`` at the last use.

    def lookup(self, digest: int) -> tuple[int, int]:
        """Return (frequency, clock) of a prefix; (0, 0) when nothing is known."""
        frequency, used_at = self._known.get(digest, (0, 0))
        return frequency, max(0, self._max_age - (self.ages - used_at)) if frequency else 0

    def admitted(self, digests: Sequence[int]) -> None:
        """Note that a request reuses these prefixes, the shortest first."""
        self._requests += 1
        if self._requests % self._aging_requests == 0:
            self.ages += 1
        for above, digest in enumerate(digests):
            self.inserted(digest, above + 1)

    def inserted(self, digest: int, level: int) -> None:
        """Note that a prefix became resident; ``level`` is the number of its blocks."""
        self._known[digest] = (self._known.get(digest, (0, 0))[0] + 1, self.ages)
