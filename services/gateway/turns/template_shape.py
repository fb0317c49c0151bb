"""The text that a chat template writes before and after an answer, found by rendering a small conversation. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.errors import InvalidRequest

Render = Callable[[Sequence[Mapping[str, Any]], bool], str]
"""A function that renders messages, with or without the opening of another answer."""

_QUESTION, _ANSWER, _NEXT = "Question1", "Answer1", "Question2"


@dataclass(frozen=True, slots=True)
class TemplateShape:
    """The text around answers.

    ``opening`` stands before one, "" if unknown; text behind one begins with ``closing``.
    """

    opening: str = ""
    closing: str = ""


def shape_of(render: Render, added_tokens: Sequence[str]) -> TemplateShape:
    """Return the shape of a template; an empty one where it does not render the conversation.

    ``added_tokens`` are texts. ``closing`` is the added token that follows an answer, or else the first character that
    does.
    """
    question = {"role": "user", "content": _QUESTION}
    try:
        asked = render([question], True)
        opening = _opening(asked, render([question], False))
        held = render([question, {"role": "assistant", "content": _ANSWER}, {**question, "content": _NEXT}], True)
    except InvalidRequest:
        return TemplateShape()
    _, found, behind = held.partition(_ANSWER)
    if not found:
        return TemplateShape(opening)
    tokens = [token for token in added_tokens if token and behind.startswith(token)]
    return TemplateShape(opening, max(tokens, key=len, default=behind[:1]))


def _opening(asked: str, told: str) -> str:
    """Return the text that asking for an answer adds; all behind the question where a template always asks for one."""
    if len(asked) > len(told) and asked.startswith(told):
        return asked[len(told) :]
    return asked.rpartition(_QUESTION)[2]
