"""How many rows one pass may have: as many as the scheduler plans, until the device had no memory for so many.

Memory of a pass grows with its rows, and what runs out once runs out again. So the bound is kept until the worker ends,
and told with its heartbeats. Results do not depend on it: a prompt may be computed in any pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shared import logs

_log = logs.get_logger("worker")


class StepRows:
    """Changed by the compute thread; :meth:`faults` may be asked by any."""

    def __init__(self) -> None:
        self.most: int | None = None

    def at_most(self, rows: int) -> int:
        """``rows``, or as many of them as may be computed at once."""
        return rows if self.most is None else min(rows, self.most)

    def shrink(self, tried: int) -> bool:
        """Bound later passes by half of what did not fit; False where nothing smaller is left."""
        tried = self.at_most(tried)
        if tried <= 1:
            return False
        self.most = tried // 2
        _log.warning("steps_shrunk", tried_rows=tried, most_rows=self.most, reason="the device ran out of memory")
        return True

    def parts(self, rows: Sequence[int]) -> Iterator[slice]:
        """Neighbours in ``rows``, none above the bound, that fit into one pass together: slices of it, in order."""
        first, total = 0, 0
        for index, count in enumerate(rows):
            if index > first and self.most is not None and total + count > self.most:
                yield slice(first, index)
                first, total = index, 0
            total += count
        yield slice(first, len(rows))

    def faults(self) -> Iterator[tuple[str, str]]:
        """Yield what, and why: nothing while steps are as large as they are planned."""
        if self.most is not None:
            yield "device memory", f"it ran out in a step, so that steps have {self.most} rows at the most"
