"""The token ids of answers, by place: bounded by bytes, least recently used dropped first. Used by several threads."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

MOST_ALTERNATIVES = 64
"""Limit on the answers kept for one place: many callers may ask the same first question, or one for several choices."""

ENTRY_BYTES = 400
"""Approximate memory of an entry besides ids and text: objects, names and the table's slots."""

MOST_NAMES = 65_536
"""Limit on remembered places of answers' texts, and also on entries known to be absent from the bucket."""


@dataclass(frozen=True, slots=True)
class Said:
    """One answer: its token ids (packed int32) and their text, which may continue behind what the caller was shown."""

    packed: bytes
    text: str

    @property
    def nbytes(self) -> int:
        """Approximate memory of the answer, in bytes."""
        return ENTRY_BYTES + len(self.packed) + sys.getsizeof(self.text)


Alternatives = tuple[Said, ...]
"""The answers at one place, the latest first, each text once."""


class AnswerMemory:
    """Answers by place, and the places where answers' texts stood last."""

    def __init__(self, most_bytes: int, observe: Callable[[int], None] = lambda nbytes: None) -> None:
        """Keep answers in up to ``most_bytes``; ``observe`` gets the bytes in use after each change."""
        self._most_bytes = most_bytes
        self._observe = observe
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, Alternatives] = OrderedDict()
        self._texts: OrderedDict[bytes, str] = OrderedDict()
        self._absent: OrderedDict[str, None] = OrderedDict()
        self.nbytes = 0

    def recall(self, names: Iterable[str]) -> dict[str, Alternatives]:
        """Return the answers at these places, and count them as used; unknown places are left out."""
        found = {}
        with self._lock:
            for name in names:
                said = self._entries.get(name)
                if said is not None:
                    self._entries.move_to_end(name)
                    found[name] = said
        return found

    def remember(self, name: str, said: Said) -> Said:
        """Put an answer first at its place, and return the one that is kept for its text.

        That is the older answer of the same text, if there is one: conversations have continued from its ids.
        """
        with self._lock:
            known = self._entries.get(name, ())
            same = next((each for each in known if each.text == said.text), said)
            self._put(name, (same, *[each for each in known if each is not same][: MOST_ALTERNATIVES - 1]))
            return same

    def note_absent(self, entry: str) -> None:
        """Remember that the bucket has no such entry."""
        with self._lock:
            _note(self._absent, entry, None)

    def is_absent(self, entry: str) -> bool:
        """Return whether the bucket was asked for this entry and had none."""
        with self._lock:
            return entry in self._absent

    def mark(self, text: bytes, name: str) -> None:
        """Remember the last place of an answer whose text has this digest."""
        with self._lock:
            _note(self._texts, text, name)

    def stood_at(self, text: bytes) -> str:
        """Return the last place of an answer whose text has this digest, or ""."""
        with self._lock:
            return self._texts.get(text, "")

    def _put(self, name: str, alternatives: Alternatives) -> None:
        self.nbytes += _nbytes(alternatives) - _nbytes(self._entries.pop(name, None))
        self._entries[name] = alternatives
        while self.nbytes > self._most_bytes and self._entries:
            _, dropped = self._entries.popitem(last=False)
            self.nbytes -= _nbytes(dropped)
        self._observe(self.nbytes)


def _note(noted: OrderedDict[K, V], key: K, value: V) -> None:
    noted[key] = value
    noted.move_to_end(key)
    if len(noted) > MOST_NAMES:
        noted.popitem(last=False)


def _nbytes(alternatives: Alternatives | None) -> int:
    if alternatives is None:
        return 0
    return ENTRY_BYTES + sum(said.nbytes for said in alternatives)
