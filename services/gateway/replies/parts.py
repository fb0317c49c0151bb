"""The parts of a model's answer, in the order in which it says them. Every endpoint writes these in its own shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """Visible text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool call with a known name. ``index`` counts the calls of one answer from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: JSON text as the model said it."""

    index: int
    text: str


ReplyPart = Text | Reasoning | CallBegun | CallArguments


class ReplyReader(Protocol):
    """Splits one choice's text into parts as it comes. What may be the beginning of a marker is withheld."""

    def feed(self, text: str) -> list[ReplyPart]:
        """Take more text; the parts that are certain now. Mutates."""

    def end(self) -> list[ReplyPart]:
        """Return the rest, at the end of the answer: an unfinished call is given as it stands. Mutates."""


class PlainReader:
    """All is text: for requests without tools to a model without reasoning."""

    def feed(self, text: str) -> list[ReplyPart]:
        return [Text(text)] if text else []

    def end(self) -> list[ReplyPart]:
        return []
