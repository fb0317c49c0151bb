"""States of requests whose last token lies within a page: each in a slot, with the token that it is as of.

Passes may fail, and be repeated. A pass overwrites the slots of its requests, so what a slot holds is only used to go
on from exactly the token that it is as of, and not at all between the beginning of a pass and its end. A request that
cannot go on from a slot begins with its page, whose beginning the page before it has the state of: repeating rows of
one page is the price of a failure, of a request that finds no slot, and of nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

RUNNING_SLOTS = 256
"""Requests that have a slot at once: as many as a worker runs (``device_bounds.MOST_RUNNING``)."""

Key = tuple[str, int]
"""A request and its attempt."""


class StateSlots(Protocol):
    """What tells passes where to begin, and where the states go that they end with."""

    def begin(self, rows: Sequence[tuple[Key, int]]) -> list[tuple[int, int]]:
        """For each request and the token that it goes on from: the token at which the pass has to begin, and the slot
        for the state that it ends with, -1 where there is none.
        """

    def reached(self, ends: Iterable[tuple[Key, int]]) -> None:
        """Note a pass of these requests that ended well, each before the token named."""


class NoSlots:
    """For models without states: each request begins where it is."""

    def begin(self, rows: Sequence[tuple[Key, int]]) -> list[tuple[int, int]]:
        return [(start, -1) for _, start in rows]

    def reached(self, ends: Iterable[tuple[Key, int]]) -> None:
        pass


@dataclass(slots=True)
class _Held:
    slot: int
    as_of: int = -1  # Token; -1 while a pass may be writing the slot.


class RunningSlots:
    """Which request has which slot. A request that finds none takes that of the one not computed for longest."""

    def __init__(self, page_size: int, slots: int) -> None:
        self._page_size, self._slots = page_size, slots
        self._held: OrderedDict[Key, _Held] = OrderedDict()  # Least recently computed first.

    def begin(self, rows: Sequence[tuple[Key, int]]) -> list[tuple[int, int]]:
        """See ``StateSlots``."""
        for key, _ in rows:
            if key in self._held:
                self._held.move_to_end(key)
        taken = {key for key, _ in rows}
        return [self._begin(key, start, taken) for key, start in rows]

    def reached(self, ends: Iterable[tuple[Key, int]]) -> None:
        """See ``StateSlots``."""
        for key, end in ends:
            if key in self._held:
                self._held[key].as_of = end

    def _begin(self, key: Key, start: int, taken: set[Key]) -> tuple[int, int]:
        held = self._held.get(key) or self._take(key, taken)
        as_of = -1
        if held is not None:
            as_of, held.as_of = held.as_of, -1
        if start % self._page_size and as_of != start:
            start -= start % self._page_size
        return start, -1 if held is None else held.slot

    def _take(self, key: Key, taken: set[Key]) -> _Held | None:
        """Return a slot for ``key``, not of any request of the same pass."""
        if len(self._held) < self._slots:
            held = _Held(len(self._held))
        else:
            oldest = next(iter(self._held), None)
            if oldest is None or oldest in taken:
                return None
            held = _Held(self._held.pop(oldest).slot)
        self._held[key] = held
        return held
