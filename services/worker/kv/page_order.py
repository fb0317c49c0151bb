"""The common parts of loads from host pools and neighbours and of promotions: lists of pages, some perhaps wrong."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.worker.kv.movers.protocol import PageMover
from services.worker.kv.page_memory import PageNumbers
from shared.ids import DIGEST_BYTES
from shared.messages.base import pack_int32
from shared.messages.worker_events import LoadFailure
from shared.messages.worker_plans import PageLoad, PromotePages

INT32_BYTES = 4


class PageCopy(Protocol):
    """The copy of one order.

    ``copy``, ``judge`` and ``confirm`` are for the transfer thread, the rest for the compute thread.
    """

    pages: OrderPages

    @property
    def is_open(self) -> bool:
        """Whether there is a pool to copy from."""

    def copy(self, mover: PageMover, layer: int, start: int, count: int) -> None:
        """Copy one layer of pages ``[start, start + count)``, at most ``mover.piece_pages``, except wrong ones."""

    def judge(self, layer: int) -> None:
        """Mark the wrong pages in the copies of this layer and those before; wait for copies that have not arrived.

        Until then none of their pages is known to be right.
        """

    def confirm(self) -> None:
        """Mark the pages that have changed during the copy; called after the last byte has arrived."""

    def failure(self) -> LoadFailure:
        """Return the report on the wrong pages for the scheduler."""


class OrderPages:
    """The pages of one order: ``source`` and ``device`` are int32 [pages]; ``identities`` uint8 [pages, 16].

    ``reason`` is the first fault ("" while all is well); ``wrong`` (bool [pages]) marks pages that must not be used.
    """

    def __init__(self, order: PageLoad | PromotePages) -> None:
        """Unpack the lists of ``order``; if their lengths differ, all of its pages are refused."""
        self.reason = ""
        self.source = _page_numbers(order.host_pages)
        self.device = _page_numbers(order.device_pages)
        self.wrong = np.zeros(len(self.source), dtype=bool)
        # In the order of the source's memory, neighbouring pages are read as one piece and address translations are
        # used more than once, which is worth a quarter of the bandwidth where pages are a token each.
        self._by_address = np.argsort(self.source, kind="stable")
        whole = len(order.identities) // DIGEST_BYTES * DIGEST_BYTES
        self.identities = np.frombuffer(order.identities[:whole], dtype=np.uint8).reshape(-1, DIGEST_BYTES)
        is_cut = len(order.host_pages) % INT32_BYTES or len(order.device_pages) % INT32_BYTES
        count = len(self.source)
        if is_cut or len(self.device) != count or len(order.identities) != count * DIGEST_BYTES:
            self.refuse("the load's lists differ in length")

    def check_bounds(self, source_pages: int, device_pages: int) -> bool:
        """Refuse an order that names pages outside either pool, or a device page twice; return whether it is sound."""
        count = len(self.source)
        if not self.reason and count:
            inside = 0 <= self.source.min() <= self.source.max() < source_pages
            if not (inside and 0 <= self.device.min() <= self.device.max() < device_pages):
                self.refuse("the load names pages outside the pools")
            elif len(np.unique(self.device)) != count:
                self.refuse("the load names a device page twice")
        return not self.reason

    def refuse(self, reason: str) -> None:
        """Mark all pages of this order as wrong."""
        self.wrong[:] = True
        self.reason = self.reason or reason

    def mark(self, wrong: npt.NDArray[np.bool_], reason: str) -> None:
        """Mark these pages (bool [pages]) as wrong."""
        if wrong.any():
            self.wrong |= wrong
            self.reason = self.reason or reason

    def usable(self, start: int, count: int) -> npt.NDArray[np.intp]:
        """Return the entries of ``[start, start + count)`` that are not wrong, in the order of the source's memory."""
        entries = self._by_address[start : start + count]
        return entries[~self.wrong[entries]]

    @property
    def wrong_pages(self) -> bytes:
        """Source pages marked as wrong, packed int32."""
        return pack_int32(self.source[self.wrong])

    def __len__(self) -> int:
        """Return the number of source pages."""
        return len(self.source)


def _page_numbers(packed: bytes) -> PageNumbers:
    """Return the whole entries of packed int32; an order with cut bytes is refused later and does not raise here."""
    return np.frombuffer(packed, dtype="<i4", count=len(packed) // INT32_BYTES).astype(np.int32)
