"""Texts of the arguments of recent calls, as the model wrote them.

The Messages API carries a tool's input as an object, and the model's text of it is lost at the client: with other
blanks the next prompt differs from there on. So a gateway remembers the texts of recent calls. A remembered text is
used only if it means the very object that came back, so it changes how a prompt is written and never its meaning.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import msgspec

MOST_CALLS = 16_384
MOST_CHARACTERS = 8 * 2**20
LONGEST_CHARACTERS = 64 * 1024
"""A longer text is not remembered: it would displace too many others."""


class SaidArguments:
    """Texts of arguments by the id of their call, least recently used dropped first. Used by any thread."""

    def __init__(self, most_calls: int = MOST_CALLS, most_characters: int = MOST_CHARACTERS) -> None:
        """Remember at most ``most_calls`` texts, of ``most_characters`` characters together."""
        self._most_calls = most_calls
        self._most_characters = most_characters
        self._texts: OrderedDict[str, str] = OrderedDict()
        self._characters = 0
        self._lock = threading.Lock()

    def note(self, call_id: str, text: str) -> None:
        """Remember the arguments of a call, unless they are too long or its id is known."""
        with self._lock:
            if len(text) > LONGEST_CHARACTERS or call_id in self._texts:
                return
            self._texts[call_id] = text
            self._characters += len(text)
            while len(self._texts) > self._most_calls or self._characters > self._most_characters:
                _, oldest = self._texts.popitem(last=False)
                self._characters -= len(oldest)

    def find(self, call_id: str, given: dict[str, Any]) -> str | None:
        """Return the text of the call's arguments if it means ``given``, else None; it counts as used."""
        with self._lock:
            text = self._texts.get(call_id)
            if text is None:
                return None
            self._texts.move_to_end(call_id)
        try:
            said = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError):
            return None
        return text if _canonical(said) == _canonical(given) else None


def _canonical(value: object) -> bytes:
    # Compared as texts: in Python 1, 1.0 and true are equal.
    return msgspec.json.encode(value, order="deterministic")
