"""Chunks that differ in one text: all but that is encoded once."""

from __future__ import annotations

import msgspec

MARK = "\0"
"""The text in whose place a template puts others."""

_encode = msgspec.json.Encoder().encode
_ENCODED_MARK = _encode(MARK)


class TextTemplate:
    """Made of the JSON of a chunk whose text is ``MARK``, which must occur once."""

    __slots__ = ("_after", "_before")

    def __init__(self, example: bytes) -> None:
        self._before, self._after = example.split(_ENCODED_MARK)

    def fill(self, text: str) -> bytes:
        """Return the chunk with ``text``, byte for byte as encoding it whole gives it."""
        return self._before + _encode(text) + self._after
