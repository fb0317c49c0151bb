"""Reasoning at the beginning of a model's text, between two markers.

One line break behind the opening marker, one before the closing one and two behind it belong to the markers: templates
write them when they give reasoning back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto

from services.gateway.replies.markers import find_first, withheld
from services.gateway.replies.parts import Reasoning, ReplyPart, ReplyReader
from services.gateway.replies.stepped_reader import SteppedReader

BREAKS_BEHIND = 2


@dataclass(frozen=True, slots=True)
class ReasoningSyntax:
    """The two markers of reasoning."""

    opener: str
    closer: str
    always_opens: bool = False  # An answer begins with reasoning even where nothing opens it.

    @property
    def markers(self) -> tuple[str, ...]:
        """The markers, which the reader must see even where they are special tokens."""
        return (self.opener, self.closer)

    def is_open_behind(self, prompt: str) -> bool:
        """Return whether the answer to a prompt with this end begins within reasoning."""
        end = prompt.rstrip()
        if end.endswith(self.closer):
            return False
        return self.always_opens or end.endswith(self.opener)


class _At(Enum):
    START = auto()
    OPENED = auto()  # Behind the opening marker.
    INSIDE = auto()
    CLOSED = auto()  # Behind the closing marker.
    REST = auto()


class ReasoningReader(SteppedReader[_At]):
    """A reader of reasoning; the text behind it goes to another reader. Implements ``ReplyReader``."""

    def __init__(self, syntax: ReasoningSyntax, rest: ReplyReader, *, begins_inside: bool) -> None:
        """``begins_inside``: the prompt has opened the reasoning already."""
        self._syntax = syntax
        self._closers = ("\n" + syntax.closer, syntax.closer)
        self._rest = rest
        self._begins_inside = begins_inside
        self._breaks = 0
        steps = {
            _At.START: self._start,
            _At.OPENED: self._opened,
            _At.INSIDE: self._inside,
            _At.CLOSED: self._closed,
            _At.REST: self._give_rest,
        }
        super().__init__(_At.START, steps)

    def end(self) -> list[ReplyPart]:
        """Return what remains of the reasoning, and of the other reader's text."""
        return super().end() + self._rest.end()

    def _start(self) -> bool:
        rest = self._buffer.lstrip()
        if rest.startswith(self._syntax.opener):
            self._buffer = rest[len(self._syntax.opener) :]
            self._at = _At.OPENED
            return True
        if self._syntax.opener.startswith(rest) and not self._is_final:
            return False
        self._at = _At.OPENED if self._begins_inside else _At.REST
        return True

    def _opened(self) -> bool:
        if not self._buffer:
            return False
        self._buffer = self._buffer.removeprefix("\n")
        self._at = _At.INSIDE
        return True

    def _inside(self) -> bool:
        found = find_first(self._buffer, self._closers)
        if found is not None:
            place, closer = found
            self._say(self._buffer[:place])
            self._buffer = self._buffer[place + len(closer) :]
            self._at = _At.CLOSED
            return True
        kept = 0 if self._is_final else withheld(self._buffer, self._closers)
        place = len(self._buffer) - kept
        self._say(self._buffer[:place])
        self._buffer = self._buffer[place:]
        return False

    def _closed(self) -> bool:
        while self._breaks < BREAKS_BEHIND and self._buffer.startswith("\n"):
            self._buffer = self._buffer[1:]
            self._breaks += 1
        if not self._buffer:
            return False
        self._at = _At.REST
        return True

    def _give_rest(self) -> bool:
        text, self._buffer = self._buffer, ""
        self._parts += self._rest.feed(text)
        return False

    def _say(self, text: str) -> None:
        if text:
            self._parts.append(Reasoning(text))


class ReasoningCount:
    """A counter of the tokens between a reply's markers of reasoning."""

    def __init__(self, syntax: ReasoningSyntax, token_bytes: Callable[[int], bytes], *, begins_inside: bool) -> None:
        """``token_bytes`` returns a token's bytes, also those of special tokens."""
        self._opener, self._closer = syntax.opener.encode(), syntax.closer.encode()
        self._token_bytes = token_bytes
        self._begins_inside = begins_inside
        self._at = _At.START
        self._read = b""  # The latest bytes, in which a marker may stand.
        self._early = 0  # Tokens before it is known whether the answer begins with a marker.
        self.tokens = 0

    def feed(self, tokens: Iterable[int]) -> None:
        """Count the reasoning among the next tokens."""
        if self._at is _At.REST:
            return
        for token in tokens:
            self._read += self._token_bytes(token)
            if self._at is _At.START:
                self._begin()
            else:
                self.tokens += self._closer not in self._read
            if self._closer in self._read and self._at is _At.INSIDE:
                self._at = _At.REST
            if self._at is _At.REST:
                return
            self._read = self._read[-len(self._closer) :] if self._at is _At.INSIDE else self._read

    def _begin(self) -> None:
        self._early += 1
        rest = self._read.lstrip()
        if rest.startswith(self._opener):
            self._at, self._read = _At.INSIDE, rest[len(self._opener) :]
        elif not self._opener.startswith(rest):
            self._at = _At.INSIDE if self._begins_inside else _At.REST
            if self._begins_inside:
                self.tokens = self._early - (self._closer in self._read)
