"""What answers were said in, by place: bounded by bytes, the longest unused go first. Used by several threads."""

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
"""Answers kept of one place: many may ask the same first question, or one asks for several choices."""

ENTRY_BYTES = 400
"""What an entry takes beside ids and text, about: objects, names and the table's slots."""

MOST_NAMES = 65_536
"""Texts of answers that are known again elsewhere, and entries that the bucket does not have: so many of each."""


@dataclass(frozen=True, slots=True)
class Said:
    """One answer: its token ids (packed int32) and their text, which may go on behind what the caller was shown."""

    packed: bytes
    text: str

    @property
    def nbytes(self) -> int:
        return ENTRY_BYTES + len(self.packed) + sys.getsizeof(self.text)


Alternatives = tuple[Said, ...]
"""What was said at one place, the latest first, each text once."""


class AnswerMemory:
    """``observe`` is told the bytes in use after each change."""

    def __init__(self, most_bytes: int, observe: Callable[[int], None] = lambda nbytes: None) -> None:
        self._most_bytes = most_bytes
        self._observe = observe
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, Alternatives] = OrderedDict()
        self._texts: OrderedDict[bytes, str] = OrderedDict()
        self._absent: OrderedDict[str, None] = OrderedDict()
        self.nbytes = 0

    def recall(self, names: Iterable[str]) -> dict[str, Alternatives]:
        """Return what is known of these places; an unknown place is left out. They count as used."""
        found = {}
        with self._lock:
            for name in names:
                said = self._entries.get(name)
                if said is not None:
                    self._entries.move_to_end(name)
                    found[name] = said
        return found

    def remember(self, name: str, said: Said) -> Said:
        """Put an answer before the others of its place, and return what stands for its text.

        That is an older answer of the same text, where there is one: conversations have gone on from its ids.
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
        """Whether the bucket was asked for this entry, and had none."""
        with self._lock:
            return entry in self._absent

    def mark(self, text: bytes, name: str) -> None:
        """Remember where an answer with a text of this digest stood last."""
        with self._lock:
            _note(self._texts, text, name)

    def stood_at(self, text: bytes) -> str:
        """Return the last place of an answer with a text of this digest; "" for none that is known."""
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
