"""Two releases of the scheduler that decide differently: one takes the lowest free pages of a pool, one the highest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from services.scheduler.core.cache.page_pool import PagePool

RELEASES = ("low pages", "high pages")


@contextmanager
def deciding(release: str) -> Iterator[None]:
    """What is folded within the block is folded by this release."""
    before = PagePool.allocate
    if release == "high pages":
        PagePool.allocate = _take_highest  # type: ignore[method-assign]
    try:
        yield
    finally:
        PagePool.allocate = before  # type: ignore[method-assign]


def _take_highest(self: PagePool, count: int) -> bytes | None:
    if count > self.free:
        return None
    if count == 0:
        return b""
    view = np.frombuffer(self.free_map, dtype=np.bool_)
    found = view.nonzero()[0][-count:]
    view[found] = False
    self.free -= count
    return found.astype("<i4").tobytes()
