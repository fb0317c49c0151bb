"""What a chat template writes before and behind an answer, found out by rendering a small conversation. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.errors import InvalidRequest

Render = Callable[[Sequence[Mapping[str, Any]], bool], str]
"""The template's text of messages, with the opening of another answer or without."""

_QUESTION, _ANSWER, _NEXT = "Question1", "Answer1", "Question2"


@dataclass(frozen=True, slots=True)
class TemplateShape:
    """``opening`` stands before an answer; "" is unknown. What stands behind one begins with ``closing``."""

    opening: str = ""
    closing: str = ""


def shape_of(render: Render, added_tokens: Sequence[str]) -> TemplateShape:
    """Return the shape of a template; an empty one where it does not render the conversation. ``added_tokens`` are
    texts.

    ``closing`` is the added token that follows an answer, or else the first character that does.
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
    """Return what asking for an answer adds; in templates that always ask for one, all that follows the question."""
    if len(asked) > len(told) and asked.startswith(told):
        return asked[len(told) :]
    return asked.rpartition(_QUESTION)[2]
