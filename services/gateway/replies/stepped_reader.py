"""A reader that is a small state machine over its unread text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Generic, TypeVar

from services.gateway.replies.parts import ReplyPart

At = TypeVar("At", bound=Enum)


class SteppedReader(Generic[At]):
    """A reader whose state ``_at`` selects the step that consumes ``_buffer`` and adds to ``_parts``.

    It implements ``ReplyReader``.
    """

    def __init__(self, start: At, steps: Mapping[At, Callable[[], bool]]) -> None:
        """Each of ``steps`` returns whether another step may follow with the same buffer."""
        self._at = start
        self._steps = steps
        self._buffer = ""
        self._is_final = False
        self._parts: list[ReplyPart] = []

    def feed(self, text: str) -> list[ReplyPart]:
        """Add text to the buffer; return the parts that the steps completed."""
        self._buffer += text
        return self._read()

    def end(self) -> list[ReplyPart]:
        """Let the steps finish the buffer, with no text to come; return the last parts."""
        self._is_final = True
        return self._read()

    def _read(self) -> list[ReplyPart]:
        while self._steps[self._at]():
            pass
        parts, self._parts = self._parts, []
        return parts
