"""What a cache of blocks remembers of prefixes: by the scheduler's filter, or exactly, to compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from services.scheduler.core.cache.hotness.filter import HotnessFilter
from services.scheduler.core.cache.hotness.tracking import base_bits_for
from shared.messages.cell_events import CellConfig

_DROPPED_SHARE = 4  # One entry in so many is freed at a time, as in the scheduler.


class BlockHotness(Protocol):
    """What policies look up, and what the cache tells."""

    @property
    def ages(self) -> int:
        """How often all clocks were lowered by one so far."""

    def lookup(self, digest: int) -> tuple[int, int]:
        """(frequency, clock) of a prefix; (0, 0) when nothing is known."""

    def admitted(self, digests: Sequence[int]) -> None:
        """A request reuses these prefixes, the shortest first."""

    def inserted(self, digest: int, level: int) -> None:
        """A prefix became resident; ``level`` is the number of its blocks."""


class FilterHotness:
    """The scheduler's cuckoo filter for a pool of ``tokens``. ``resident`` gives the digests that it must keep."""

    def __init__(self, tokens: int, config: CellConfig | None = None) -> None:
        config = config or CellConfig()
        self.resident: Callable[[], Iterable[int]] = tuple
        self.filter = HotnessFilter(
            fingerprint_bits=config.fingerprint_bits,
            clock_bits=config.clock_bits,
            frequency_bits=config.frequency_bits,
            depth_bits=config.depth_bits,
            base_bits=base_bits_for(tokens),
        )
        self._aging_requests = config.aging_requests
        self._requests = 0

    @property
    def ages(self) -> int:
        return self.filter.ages

    def lookup(self, digest: int) -> tuple[int, int]:
        return self.filter.lookup(digest)

    def admitted(self, digests: Sequence[int]) -> None:
        self._requests += 1
        if self._requests % self._aging_requests == 0:
            self.filter.age()
        for above, digest in enumerate(digests):
            self.inserted(digest, above + 1)

    def inserted(self, digest: int, level: int) -> None:
        if not self.filter.touch(digest, level):
            self._make_room()
            self.filter.touch(digest, level)  # Where there is no room even now, it stays unknown.

    def _make_room(self) -> None:
        """As the scheduler does: half of the entries are for what is resident, the rest for what was."""
        resident = np.fromiter(self.resident(), dtype=np.uint64)
        if 2 * len(resident) <= self.filter.capacity or not self.filter.grow():
            self.filter.drop_coldest(resident, self.filter.capacity // _DROPPED_SHARE)
