"""The bound on rows of one pass: as many as the scheduler plans, until the device had no memory for so many.

Memory of a pass grows with its rows, and if it runs out once it runs out again. So the bound is kept until the worker
ends, and reported with its heartbeats. Results do not depend on it: a prompt may be computed in any pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shared import logs

_log = logs.get_logger("worker")


class StepRows:
    """The bound on rows. Changed by the compute thread; :meth:`faults` is safe from any thread."""

    def __init__(self) -> None:
        """Begin without a bound: ``most`` is None."""
        self.most: int | None = None

    def at_most(self, rows: int) -> int:
        """Return ``rows``, or the bound if that is less."""
        return rows if self.most is None else min(rows, self.most)

    def shrink(self, tried: int) -> bool:
        """Bound later passes by half of the rows that did not fit; return False where nothing smaller is left."""
        tried = self.at_most(tried)
        if tried <= 1:
            return False
        self.most = tried // 2
        _log.warning("steps_shrunk", tried_rows=tried, most_rows=self.most, reason="the device ran out of memory")
        return True

    def parts(self, rows: Sequence[int]) -> Iterator[slice]:
        """Yield slices of ``rows``, in order; the rows of each fit into one pass. No entry is above the bound."""
        first, total = 0, 0
        for index, count in enumerate(rows):
            if index > first and self.most is not None and total + count > self.most:
                yield slice(first, index)
                first, total = index, 0
            total += count
        yield slice(first, len(rows))

    def faults(self) -> Iterator[tuple[str, str]]:
        """Yield (resource, reason) while passes are smaller than planned."""
        if self.most is not None:
            yield "device memory", f"it ran out in a step, so that steps have {self.most} rows at the most"
