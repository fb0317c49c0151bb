"""States of requests whose last token lies within a page: each in a slot, with the token that it is as of.

Passes may fail, and be repeated. A pass overwrites the slots of its requests, so a request goes on from a slot only at
exactly the token that its state is as of, and never where an unfinished pass may have written the slot. Otherwise it
begins with its page, from the state that the page before it holds: repeating rows of one page is the price of a failure
or of a request without a slot, and of nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

RUNNING_SLOTS = 256
"""Requests that have a slot at once: as many as a worker runs (``device_bounds.MOST_RUNNING``)."""

PAGES_A_SLOT = 4
"""On a GPU, where slots take memory from the pool, it has as many pages as this for each slot, or more: requests of
fewer pages are those without a slot, which repeat the rows of their last page.
"""

Key = tuple[str, int]
"""A request and its attempt."""


class StateSlots(Protocol):
    """The slots of running requests: where a pass has to begin, and where its last states go."""

    def begin(self, rows: Sequence[tuple[Key, int]]) -> list[tuple[int, int]]:
        """Return the token at which each request's pass has to begin, and the slot for its last state.

        ``rows`` are requests, each with the token that it goes on from. A slot is -1 where there is none.
        """

    def reached(self, ends: Iterable[tuple[Key, int]]) -> None:
        """Record a pass of these requests that ended well, each before the token named."""

    def go_on(self, rows: Sequence[tuple[Key, int]]) -> bool:
        """Return whether :meth:`begin` would have each of ``rows`` go on from its own token. Changes nothing."""


def slots_over(pages: int, kind: str) -> int:
    """Return the number of slots beside a pool of ``pages`` pages on a device of this kind, "cpu" or "cuda".

    There are no more slots than pages: each request within a page has one of its own.
    """
    return min(RUNNING_SLOTS, pages if kind == "cpu" else max(1, pages // PAGES_A_SLOT))


def pages_beside_slots(nbytes: int, page_bytes: int, slot_bytes: int) -> int:
    """Return how many pages fit into ``nbytes`` of a GPU with the slots over them, and the slot of padding."""
    nbytes -= slot_bytes  # The slot of padding.
    pages = (nbytes - RUNNING_SLOTS * slot_bytes) // page_bytes
    if pages < RUNNING_SLOTS * PAGES_A_SLOT:
        pages = nbytes * PAGES_A_SLOT // (page_bytes * PAGES_A_SLOT + slot_bytes)
        if pages < PAGES_A_SLOT:  # One slot at least.
            pages = (nbytes - slot_bytes) // page_bytes
    return max(0, pages)


class NoSlots:
    """No slots, for models without states."""

    def begin(self, rows: Sequence[tuple[Key, int]]) -> list[tuple[int, int]]:
        """Return each request's own token and no slot."""
        return [(start, -1) for _, start in rows]

    def reached(self, ends: Iterable[tuple[Key, int]]) -> None:
        """Do nothing: there are no states to record."""

    def go_on(self, rows: Sequence[tuple[Key, int]]) -> bool:
        """Return True: nothing but K and V is needed of earlier tokens."""
        return True


@dataclass(slots=True)
class _Held:
    slot: int
    as_of: int = -1  # Token; -1 while a pass may be writing the slot.


class RunningSlots:
    """Slots by request. A request without one takes a free slot, else that of the least recently computed request."""

    def __init__(self, page_size: int, slots: int) -> None:
        """Begin with ``slots`` free slots, numbered from 0; a page has ``page_size`` tokens."""
        self._page_size, self._slots = page_size, slots
        self._held: OrderedDict[Key, _Held] = OrderedDict()  # Least recently computed first.

    def begin(self, rows: Sequence[tuple[Key, int]]) -> list[tuple[int, int]]:
        """Assign slots, and mark them as being written until :meth:`reached`; see ``StateSlots``."""
        for key, _ in rows:
            if key in self._held:
                self._held.move_to_end(key)
        taken = {key for key, _ in rows}
        return [self._begin(key, start, taken) for key, start in rows]

    def reached(self, ends: Iterable[tuple[Key, int]]) -> None:
        """Record the tokens that the slots' states are as of; see ``StateSlots``."""
        for key, end in ends:
            if key in self._held:
                self._held[key].as_of = end

    def go_on(self, rows: Sequence[tuple[Key, int]]) -> bool:
        """Return whether each request's slot holds its state as of its own token; see ``StateSlots``."""
        return all(key in self._held and self._held[key].as_of == start for key, start in rows)

    def _begin(self, key: Key, start: int, taken: set[Key]) -> tuple[int, int]:
        held = self._held.get(key) or self._take(key, taken)
        as_of = -1
        if held is not None:
            as_of, held.as_of = held.as_of, -1
        if start % self._page_size and as_of != start:
            start -= start % self._page_size
        return start, -1 if held is None else held.slot

    def _take(self, key: Key, taken: set[Key]) -> _Held | None:
        """Return a slot for ``key``, of no other request of the same pass; None where there is none."""
        if len(self._held) < self._slots:
            held = _Held(len(self._held))
        else:
            oldest = next(iter(self._held), None)
            if oldest is None or oldest in taken:
                return None
            held = _Held(self._held.pop(oldest).slot)
        self._held[key] = held
        return held
