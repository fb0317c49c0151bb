"""One choice's answer, read part by part as its tokens come."""

from __future__ import annotations

from services.gateway.assembly import Delta
from services.gateway.replies.parts import CallBegun, PlainReader, ReplyPart, ReplyReader


class Reply:
    """What a choice has said so far. Views feed it every delta once, in order (:meth:`read`)."""

    def __init__(self, reader: ReplyReader | None = None) -> None:
        """Without a ``reader`` all is text."""
        self._reader = reader if reader is not None else PlainReader()
        self.reasoning_tokens = 0
        self.has_calls = False

    def read(self, delta: Delta) -> list[ReplyPart]:
        """The parts that are certain now, all of them at the end of the answer. Mutates."""
        parts = self._reader.feed(delta.text)
        if delta.finish is not None:
            parts += self._reader.end()
        self.has_calls = self.has_calls or any(isinstance(part, CallBegun) for part in parts)
        return parts

    def finish_reason(self, finish: str | None) -> str | None:
        """OpenAI's reason: ``tool_calls`` in place of ``stop`` for an answer with calls."""
        return "tool_calls" if finish == "stop" and self.has_calls else finish
