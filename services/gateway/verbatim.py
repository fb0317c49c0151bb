"""Texts that a chat template writes as JSON and that must stand in its prompt unchanged.

A template that writes ``{{ arguments | tojson }}`` formats an object its own way, which differs in blanks and escapes
from the model's text: the next turn would miss the cache from there on. So the template is given a mark, which it
writes as a JSON string, and the text replaces it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_NONCE = secrets.token_hex(8)  # No caller can write a mark into a message.
_MARK = re.compile(f'"verbatim-{_NONCE}-(\\d+)-"')


class Verbatim(str):
    """A call's arguments, to stand in the prompt unchanged."""

    __slots__ = ()


def hidden(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[str]]:
    """Return the messages with a mark in place of each :class:`Verbatim`, and the texts by number."""
    texts: list[str] = []
    return [_hidden_in(message, texts) if message.get("tool_calls") else message for message in messages], texts


def shown(rendered: str, texts: Sequence[str], marked: Callable[[str], str]) -> str:
    """Return the rendered text with marks replaced by their texts.

    Each text goes through ``marked``, as all callers' texts do.
    """
    return _MARK.sub(lambda found: marked(texts[int(found[1])]), rendered) if texts else rendered


def _hidden_in(message: Mapping[str, Any], texts: list[str]) -> dict[str, Any]:
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        if isinstance(function.get("arguments"), Verbatim):
            function = {**function, "arguments": f"verbatim-{_NONCE}-{len(texts)}-"}
            texts.append(str(call["function"]["arguments"]))
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}
