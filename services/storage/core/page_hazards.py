"""Host pages that saves have still to read, so that they are not written first.

The scheduler may give a host page to a later order as soon as it has told the storage to save the page: orders take
effect in order. Saves wait for buffers and disks, so the storage keeps that order page by page: a later order that
writes a page waits for the earlier reads of it, and for no read that was ordered after it.
"""

from __future__ import annotations

from collections.abc import Iterable


class PageHazards:
    """Ordered reads that are not done, by ticket. Memory is proportional to the pages they name."""

    def __init__(self) -> None:
        """Begin with no reads."""
        self._pages: dict[int, tuple[int, ...]] = {}  # Pages by ticket.
        self._readers: dict[int, dict[int, None]] = {}  # Tickets by page.
        self._next = 1

    def __len__(self) -> int:
        """Return the number of ordered reads that are not done."""
        return len(self._pages)

    def begin(self, pages: Iterable[int]) -> int:
        """Note an ordered read of these host pages; return its ticket."""
        ticket = self._next
        self._next += 1
        self._pages[ticket] = tuple(dict.fromkeys(pages))
        for page in self._pages[ticket]:
            self._readers.setdefault(page, {})[ticket] = None
        return ticket

    def finish(self, ticket: int) -> bool:
        """End that read, done or given up; return False if it was over already."""
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
        """Return the reads that must be done before these pages may be written; reads ordered later are not in it."""
        if not self._readers:
            return ()
        return tuple(dict.fromkeys(ticket for page in pages for ticket in self._readers.get(page, ())))

    def is_clear(self, tickets: tuple[int, ...]) -> bool:
        """Return whether all of these reads are done."""
        return not any(ticket in self._pages for ticket in tickets)
