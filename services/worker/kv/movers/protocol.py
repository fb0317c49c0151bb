"""The interface of all movers of pages, so that one can take another's place.

Little's law limits a mover: bytes in flight = bandwidth x latency (Strata section 3.1). ``per_page`` asks for one copy
per page and half, which is small; ``batched`` gathers rows into few large copies; ``gpu_assisted`` has a GPU kernel
read host memory itself, with thousands of small reads in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from services.worker.kv.page_memory import Bools, PageMemory, PageNumbers
from services.worker.kv.profile import MoverName
from services.worker.kv.row_checks import RowChecks

__all__ = ["Fence", "Known", "MoverName", "PageMover", "Verdict", "nothing_wrong"]


class Fence(Protocol):
    """A point in a mover's work. Satisfied by ``torch.cuda.Event``."""

    def synchronize(self) -> None:
        """Wait until everything before this point has been done."""


class Verdict(Protocol):
    """Which pages of one load failed their check."""

    def wrong(self) -> Bools:
        """Return the pages that failed, bool [pages].

        Waits until they are known: at the latest when a fence made after the load has passed. A wrong page may or may
        not have been written to its device page, in part or whole: that page may not be read until something else has
        been written to it.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """Satisfies :class:`Verdict` where rows were checked before they were copied: a wrong row was not written."""

    pages: Bools

    def wrong(self) -> Bools:
        """Return ``pages`` at once, bool [pages]."""
        return self.pages


def nothing_wrong(count: int) -> Known:
    """Return the verdict on ``count`` pages without checks."""
    return Known(np.zeros(count, dtype=bool))


class PageMover(Protocol):
    """Moves rows of pages into and out of one device pool. Used by one thread.

    Page numbers are inside both memories and device pages of a call are distinct: the caller has seen to that.
    """

    name: MoverName
    piece_pages: int  # Pages of one call, few enough that a load can be given up between calls.

    def load(
        self,
        source: PageMemory,
        layers: range,
        pages: PageNumbers,
        device_pages: PageNumbers,
        checks: RowChecks | None = None,
    ) -> Verdict:
        """Copy ``layers`` of ``pages`` into ``device_pages``. Without ``checks`` no page is wrong.

        On a GPU the bytes are there after :meth:`fence`, and rows may be checked there: a wrong one has been written
        then, and only the verdict tells. So no device page is used before the verdict on it was read.

        ``source`` is host memory, or memory of a device (a neighbour's pool), for which there are no checks.
        """

    def store(self, target: PageMemory, layers: range, device_pages: PageNumbers, pages: PageNumbers) -> None:
        """Copy ``layers`` of ``device_pages`` into ``pages`` of host memory. The bytes are there when it returns."""

    def fence(self) -> Fence | None:
        """Return a point after all loads so far and their checks; None when they are done."""

    def drain(self) -> None:
        """Return when no copy of this mover is writing any more."""
