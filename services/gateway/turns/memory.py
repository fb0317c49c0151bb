"""What answers were said in, by place: bounded by bytes, the longest unused go first. Used by several threads."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

MOST_ALTERNATIVES = 4
"""Answers kept of one place: a question may be asked again, or for several choices."""

ENTRY_BYTES = 400
"""What an entry takes beside ids and text, about: objects, names and the table's slots."""

MARKED_TEXTS = 65_536
"""Texts of answers that are known again elsewhere, 16 bytes each."""


@dataclass(frozen=True, slots=True)
class Said:
    """One answer: its token ids (packed int32) and their text, which may go on behind what the caller was shown."""

    packed: bytes
    text: str

    @property
    def nbytes(self) -> int:
        return ENTRY_BYTES + len(self.packed) + sys.getsizeof(self.text)


Alternatives = tuple[Said, ...]
"""What was said at one place, the latest first; empty where it is known that nothing is known."""


class AnswerMemory:
    """``observe`` is told the bytes in use after each change."""

    def __init__(self, most_bytes: int, observe: Callable[[int], None] = lambda nbytes: None) -> None:
        self._most_bytes = most_bytes
        self._observe = observe
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, Alternatives] = OrderedDict()
        self._texts: OrderedDict[bytes, str] = OrderedDict()
        self.nbytes = 0

    def recall(self, names: Iterable[str]) -> dict[str, Alternatives]:
        """What is known of these places; a place of which nothing is known is left out. They count as used."""
        found = {}
        with self._lock:
            for name in names:
                said = self._entries.get(name)
                if said is not None:
                    self._entries.move_to_end(name)
                    found[name] = said
        return found

    def remember(self, name: str, said: Said) -> None:
        """Put an answer before the others of its place. One of the same tokens takes the older one's place."""
        with self._lock:
            others = [known for known in self._entries.get(name, ()) if known.packed != said.packed]
            self._put(name, (said, *others[: MOST_ALTERNATIVES - 1]))

    def learn(self, name: str, alternatives: Sequence[Said]) -> None:
        """Take in what others know of a place; what is known here already stays."""
        with self._lock:
            if name not in self._entries:
                self._put(name, tuple(alternatives[:MOST_ALTERNATIVES]))

    def mark(self, text: bytes, name: str) -> None:
        """Remember where an answer with a text of this digest stood last."""
        with self._lock:
            self._texts[text] = name
            self._texts.move_to_end(text)
            if len(self._texts) > MARKED_TEXTS:
                self._texts.popitem(last=False)

    def stood_at(self, text: bytes) -> str:
        """The place where an answer with a text of this digest stood last; "" for none that is known."""
        with self._lock:
            return self._texts.get(text, "")

    def _put(self, name: str, alternatives: Alternatives) -> None:
        self.nbytes += _nbytes(alternatives) - _nbytes(self._entries.pop(name, None))
        self._entries[name] = alternatives
        while self.nbytes > self._most_bytes and self._entries:
            _, dropped = self._entries.popitem(last=False)
            self.nbytes -= _nbytes(dropped)
        self._observe(self.nbytes)


def _nbytes(alternatives: Alternatives | None) -> int:
    if alternatives is None:
        return 0
    return ENTRY_BYTES + sum(said.nbytes for said in alternatives)
