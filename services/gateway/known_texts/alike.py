"""Recent long texts, to compare others with.

They are bounded by bytes, and the least recently used is dropped first. Several threads use them.

A text is found by its namespace and its first characters, whose hash in a dictionary cannot be foreseen outside the
process. Of the texts with the same beginning, only the latest are kept.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

LEAST_CHARACTERS = 16_384
"""A shorter text is not kept: it is hashed in 20 microseconds."""

HEAD_CHARACTERS = 1_024
MOST_ALIKE = 4
STEP_CHARACTERS = 65_536
LEAST_STEP = 1_024

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Entry(Generic[V]):
    """A text and the value kept for it, which takes ``nbytes`` with the text."""

    text: str
    value: V
    nbytes: int


class TextsAlike(Generic[V]):
    """Texts with values, by namespace and beginning."""

    def __init__(
        self,
        most_bytes: int,
        observe: Callable[[int], None] = lambda nbytes: None,
        *,
        least_characters: int = LEAST_CHARACTERS,
    ) -> None:
        """Keep texts and their values in up to ``most_bytes``; with 0 none is kept.

        ``observe`` gets the bytes in use after each change, in the thread that made it. Texts of fewer than
        ``least_characters`` are neither kept nor looked up.
        """
        self.nbytes = 0
        self.least_characters = least_characters
        self._most_bytes = most_bytes
        self._observe = observe
        self._head = min(HEAD_CHARACTERS, least_characters)
        self._lock = threading.Lock()
        self._alike: OrderedDict[tuple[str, str], tuple[Entry[V], ...]] = (
            OrderedDict()
        )  # By namespace and beginning, the latest last.

    def nearest(self, namespace: str, text: str) -> tuple[Entry[V], int] | None:
        """Return the namespace's text with the longest common beginning, and the length of that beginning.

        The length is in characters, and may be a few too low. Returns None where no text agrees.
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
        """Keep a text and its ``value`` of ``nbytes``, in place of ``replaced``, the text that it continues."""
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
    """Return the length of the common beginning, or a few characters less.

    Copies stay small enough for the processor's cache.
    """
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
