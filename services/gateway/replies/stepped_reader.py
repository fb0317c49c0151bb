"""A reader that is a small state machine over what it has not yet said."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Generic, TypeVar

from services.gateway.replies.parts import ReplyPart

At = TypeVar("At", bound=Enum)


class SteppedReader(Generic[At]):
    """Implements ``ReplyReader``. Where it is decides what takes from ``_buffer`` and adds to ``_parts`` next."""

    def __init__(self, start: At, steps: Mapping[At, Callable[[], bool]]) -> None:
        """Each of ``steps`` returns whether there may be more to do with what is in the buffer."""
        self._at = start
        self._steps = steps
        self._buffer = ""
        self._is_final = False
        self._parts: list[ReplyPart] = []

    def feed(self, text: str) -> list[ReplyPart]:
        self._buffer += text
        return self._read()

    def end(self) -> list[ReplyPart]:
        self._is_final = True
        return self._read()

    def _read(self) -> list[ReplyPart]:
        while self._steps[self._at]():
            pass
        parts, self._parts = self._parts, []
        return parts
