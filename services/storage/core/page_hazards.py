"""Which host pages saves have still to read, so that they are not written first.

The scheduler may give a host page to a later order's data as soon as it has told the storage to save what the page
holds: orders take effect in order. Saves wait for buffers and disks, so the storage keeps that order page by page: a
later order that writes a page waits for the earlier reads of it, and for no read that was ordered after it.
"""

from __future__ import annotations

from collections.abc import Iterable


class PageHazards:
    """Reads that were ordered and are not done, by ticket. Memory is that of the pages they name."""

    def __init__(self) -> None:
        self._pages: dict[int, tuple[int, ...]] = {}  # By ticket.
        self._readers: dict[int, dict[int, None]] = {}  # By page: tickets.
        self._next = 1

    def __len__(self) -> int:
        return len(self._pages)

    def begin(self, pages: Iterable[int]) -> int:
        """Note an ordered read of these host pages. Returns its ticket."""
        ticket = self._next
        self._next += 1
        self._pages[ticket] = tuple(dict.fromkeys(pages))
        for page in self._pages[ticket]:
            self._readers.setdefault(page, {})[ticket] = None
        return ticket

    def finish(self, ticket: int) -> bool:
        """End that read, whether done or given up. False if it was over already."""
        pages = self._pages.pop(ticket, None)
        if pages is None:
            return False
        for page in pages:
            readers = self._readers[page]
            readers.pop(ticket, None)
            if not readers:
                del self._readers[page]
        return True

    def before(self, pages: Iterable[int]) -> tuple[int, ...]:
        """Return reads that must be done before these pages may be written; later ones will not be among them."""
        if not self._readers:
            return ()
        return tuple(dict.fromkeys(ticket for page in pages for ticket in self._readers.get(page, ())))

    def is_clear(self, tickets: tuple[int, ...]) -> bool:
        """Whether all of these reads are done."""
        return not any(ticket in self._pages for ticket in tickets)
