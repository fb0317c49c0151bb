"""Chunks that differ only in one text: everything else is encoded once."""

from __future__ import annotations

import msgspec

MARK = "\0"
"""The text that a template replaces."""

_encode = msgspec.json.Encoder().encode
_ENCODED_MARK = _encode(MARK)


class TextTemplate:
    """A chunk's JSON with room for another text."""

    __slots__ = ("_after", "_before")

    def __init__(self, example: bytes) -> None:
        """Cut ``example``, the JSON of a chunk, at its text ``MARK``. Raises ValueError unless that occurs once."""
        self._before, self._after = example.split(_ENCODED_MARK)

    def fill(self, text: str) -> bytes:
        """Return the chunk with ``text``, byte for byte as if it were encoded whole."""
        return self._before + _encode(text) + self._after
