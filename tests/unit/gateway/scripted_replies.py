"""Choices whose text means what a test says: parts by the letter that stands for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from services.gateway.assembly import Delta
from services.gateway.pending import Choice, Generation
from services.gateway.replies.parts import CallArguments, CallBegun, Reasoning, ReplyPart, Text
from services.gateway.replies.reading import Reply
from shared.messages.requests import CacheHints
from shared.messages.tokens import TokenItem, Usage
from shared.messages.worker_events import FinishReason
from tests.scripted_cell import submit

PARTS: Mapping[str, Sequence[ReplyPart]] = {
    "r": [Reasoning("let me ")],
    "R": [Reasoning("think")],
    "t": [Text("Hello")],
    "T": [Text(" there")],
    "c": [CallBegun(0, "call_0", "weather")],
    "a": [CallArguments(0, '{"city":')],
    "A": [CallArguments(0, ' "Oslo"}')],
    "d": [CallBegun(1, "call_1", "time"), CallArguments(1, "{}")],
}
"""What each letter of an answer's text stands for."""


class LetterReader:
    """Implements ``ReplyReader``."""

    def feed(self, text: str) -> list[ReplyPart]:
        return [part for letter in text for part in PARTS[letter]]

    def end(self) -> list[ReplyPart]:
        return []


def generation(prompt_tokens: int = 8, cache: CacheHints | None = None) -> Generation:
    """One choice of a streamed answer, read by letters."""
    request = replace(submit("r-0", [*range(prompt_tokens)], 64), cache=cache or CacheHints())
    return Generation([Choice(request, 0, 0, 0.0, Reply(LetterReader()))], is_streaming=True)


def hear(
    choice: Choice,
    letters: str,
    finish: FinishReason | None = None,
    usage: Usage | None = None,
    stop: str | None = None,
) -> None:
    """Let the worker send one token for each letter."""
    item = TokenItem(
        request_id=choice.request_id,
        attempt=1,
        index=choice.assembly.next_index,
        tokens=tuple(range(len(letters))),
        text=letters,
        finish=finish,
        usage=usage,
        stop_match=stop,
    )
    choice.accept("w", item, 1.0)


def say(choice: Choice, letters: str, finish: FinishReason | None = None) -> Delta:
    """The same; what is new by it."""
    hear(choice, letters, finish)
    return choice.assembly.take()
