"""Long texts of late, to compare others with: bounded by bytes, the longest unused go first. Used by several threads.

A text is found by its namespace and its first characters, and the dictionary's hash of them cannot be foreseen outside
the process. Of more texts that begin alike than are kept, the latest are.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

LEAST_CHARACTERS = 16_384
"""A shorter text is hashed in 20 microseconds, and is not worth a place."""

HEAD_CHARACTERS = 1_024
MOST_ALIKE = 4
STEP_CHARACTERS = 65_536
LEAST_STEP = 1_024

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Entry(Generic[V]):
    """A text and what is known of it, which takes ``nbytes`` beside the text."""

    text: str
    value: V
    nbytes: int


class TextsAlike(Generic[V]):
    """``most_bytes`` 0: none is kept. ``observe`` is told the bytes in use after each change."""

    def __init__(
        self,
        most_bytes: int,
        observe: Callable[[int], None] = lambda nbytes: None,
        *,
        least_characters: int = LEAST_CHARACTERS,
    ) -> None:
        self.nbytes = 0
        self.least_characters = least_characters
        self._most_bytes = most_bytes
        self._observe = observe
        self._head = min(HEAD_CHARACTERS, least_characters)
        self._lock = threading.Lock()
        self._alike: OrderedDict[tuple[str, str], tuple[Entry[V], ...]] = OrderedDict()  # Of each, the latest last.

    def nearest(self, namespace: str, text: str) -> tuple[Entry[V], int] | None:
        """Return the text of a namespace that agrees longest with this one, and for how many characters, or a few
        less.
        """
        if len(text) < self.least_characters or not self._most_bytes:
            return None
        key = namespace, text[: self._head]
        with self._lock:
            alike = self._alike.get(key, ())
            if alike:
                self._alike.move_to_end(key)
        agreed = [(_agreed(entry.text, text, min(LEAST_STEP, self._head)), entry) for entry in reversed(alike)]
        most, nearest = max(agreed, key=lambda pair: pair[0], default=(0, None))
        return None if nearest is None or not most else (nearest, most)

    def put(self, namespace: str, text: str, value: V, nbytes: int, replaced: Entry[V] | None) -> None:
        """Keep a text, in the place of one that it goes on from. ``value`` takes ``nbytes``."""
        if len(text) < self.least_characters or not self._most_bytes:
            return
        made = Entry(text, value, nbytes + sys.getsizeof(text))
        key = namespace, text[: self._head]
        with self._lock:
            had = self._alike.pop(key, ())
            kept = (*(entry for entry in had if entry is not replaced), made)[-MOST_ALIKE:]
            self._alike[key] = kept
            self.nbytes += sum(entry.nbytes for entry in kept) - sum(entry.nbytes for entry in had)
            while self.nbytes > self._most_bytes:
                _, dropped = self._alike.popitem(last=False)
                self.nbytes -= sum(entry.nbytes for entry in dropped)
            nbytes = self.nbytes
        self._observe(nbytes)


def _agreed(known: str, text: str, least_step: int) -> int:
    """Characters that both begin with, or a few less. What is cut out to be compared stays in the cache."""
    at, most, step = 0, min(len(known), len(text)), STEP_CHARACTERS
    while at < most:
        end = min(at + step, most)
        if text[at:end] == known[at:end]:
            at = end
        elif step > least_step:
            step = max(least_step, step // 8)
        else:
            break
    return at
