"""One choice's answer, split into parts as its tokens arrive."""

from __future__ import annotations

from services.gateway.assembly import Delta
from services.gateway.replies.parts import CallBegun, PlainReader, ReplyPart, ReplyReader
from services.gateway.replies.reasoning_reader import ReasoningCount

PIECE_CHARACTERS = 4096
"""Characters given to a reader at a time: each marker costs it a copy of the rest."""


class Reply:
    """The reader and the state of one choice's answer. Views feed it every delta once, in order (:meth:`read`)."""

    def __init__(
        self, reader: ReplyReader | None = None, count: ReasoningCount | None = None, *, is_named: bool = False
    ) -> None:
        """Without a ``reader`` all is text, without a ``count`` nothing is reasoning.

        If ``is_named``, the request named the function to call.
        """
        self._reader = reader if reader is not None else PlainReader()
        self._count = count
        self._is_named = is_named
        self.has_calls = False

    @property
    def reasoning_tokens(self) -> int | None:
        """Number of tokens between the markers of reasoning so far; None for a model without."""
        return self._count.tokens if self._count is not None else None

    def read(self, delta: Delta) -> list[ReplyPart]:
        """Return the parts that are certain now; with the last delta, all that remain."""
        if self._count is not None:
            self._count.feed(delta.tokens)
        parts: list[ReplyPart] = []
        for start in range(0, len(delta.text), PIECE_CHARACTERS):
            parts += self._reader.feed(delta.text[start : start + PIECE_CHARACTERS])
        if delta.finish is not None:
            parts += self._reader.end()
        self.has_calls = self.has_calls or any(isinstance(part, CallBegun) for part in parts)
        return parts

    def finish_reason(self, finish: str | None) -> str | None:
        """Return OpenAI's reason for the end of an answer.

        It is ``tool_calls`` instead of ``stop`` for an answer with calls, unless the function was named.
        """
        return "tool_calls" if finish == "stop" and self.has_calls and not self._is_named else finish
