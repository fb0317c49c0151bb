"""The parts of a model's answer, in the order in which it writes them. Each endpoint has its own shapes for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """Visible text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The beginning of a tool call, whose name is known. ``index`` counts the calls of one answer from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: JSON text as the model wrote it."""

    index: int
    text: str


ReplyPart = Text | Reasoning | CallBegun | CallArguments


class ReplyReader(Protocol):
    """A splitter of one choice's text into parts. Text that may be the beginning of a marker is withheld."""

    def feed(self, text: str) -> list[ReplyPart]:
        """Add text; return the parts that are certain now."""

    def end(self) -> list[ReplyPart]:
        """Return the rest, at the end of the answer; an unfinished call is returned as it stands."""


class PlainReader:
    """A reader for which all is text: for requests without tools to a model without reasoning."""

    def feed(self, text: str) -> list[ReplyPart]:
        """Return the text as one part; nothing is withheld."""
        return [Text(text)] if text else []

    def end(self) -> list[ReplyPart]:
        """Return no parts: no text was withheld."""
        return []
