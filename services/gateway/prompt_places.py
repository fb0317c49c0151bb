"""Which message of a conversation, or which other part of its prompt, a token lies in. Pure.

A template writes the contents of messages in their order, with text of its own around them. So contents are searched
one after the other in the text of the prompt's own tokens, and nothing is rendered again. Content that a template
leaves out or changes is not found; content after it is. Texts are searched, not parsed: where a message repeats the
template's text right before it, the border between both may be off by that text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from services.gateway.openai_schema.chat import ChatMessage, ChatRequest
from services.gateway.openai_schema.explanation import Part

_AROUND_TOOLS = 80
"""Assumed characters between the start of a template's list of tools and the first tool's name."""


@dataclass(frozen=True, slots=True)
class Place:
    """A part of a prompt. ``message`` counts from 0; the template's text between two messages belongs to the second.

    ``tools`` are the names of all tools of the request; ``is_first`` says that no message of its role comes before.
    """

    part: Part
    message: int | None = None
    role: str | None = None
    is_first: bool = True
    tools: tuple[str, ...] = ()


def place_of(
    request: ChatRequest, tokens: Sequence[int], position: int, decode: Callable[[Sequence[int]], str]
) -> Place:
    """Return the place of token ``position`` in the prompt made of ``request``. ``decode`` keeps special tokens."""
    text = decode(tokens)
    start, end = len(_whole(decode(tokens[:position]))), len(_whole(decode(tokens[: position + 1])))
    contents = _contents(request.messages, text)
    names = tuple(name for tool in request.tools or () if (name := _name_of(tool)))
    for index, (begin, stop) in enumerate(contents):
        if start < stop and end > begin:
            return _at(request.messages, index, "message", names)
    if _is_among_tools(request, text, start, names):
        return Place("tools", tools=names)
    following = next((index for index, (begin, _) in enumerate(contents) if start < begin), None)
    return Place("generation_prompt") if following is None else _at(request.messages, following, "template", names)


def _at(messages: Sequence[ChatMessage], index: int, part: Part, names: tuple[str, ...]) -> Place:
    role = messages[index].role
    return Place(part, index, role, all(message.role != role for message in messages[:index]), names)


def _contents(messages: Sequence[ChatMessage], text: str) -> list[tuple[int, int]]:
    """Return start and end of each message's content; one that is not found is empty, where it would be."""
    found, cursor = [], 0
    for message in messages:
        content = _text_of(message)
        begin = text.find(content, cursor)
        if begin < 0:
            content = content.strip()
            begin = text.find(content, cursor)
        if begin < 0 or not content:
            found.append((cursor, cursor))
            continue
        cursor = begin + len(content)
        found.append((begin, cursor))
    return found


def _text_of(message: ChatMessage) -> str:
    if message.content is None or isinstance(message.content, str):
        return message.content or ""
    return "\n".join(part.text or "" for part in message.content)


def _is_among_tools(request: ChatRequest, text: str, start: int, names: tuple[str, ...]) -> bool:
    """Return whether a position outside of all contents lies where the template lists the tools."""
    known = "|".join(map(re.escape, names))
    listed = list(re.finditer(rf"""["']?name["']?\s*[:=]\s*["'](?:{known})["']""", text)) if names else []
    if not listed:
        return False
    longest = max(len(msgspec.json.encode(tool)) for tool in request.tools or ())
    return listed[0].start() - _AROUND_TOOLS <= start <= listed[-1].end() + longest


def _name_of(tool: dict[str, object]) -> str:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else tool.get("name")
    return name if isinstance(name, str) else ""


def _whole(text: str) -> str:
    """Return the text without the end of a character whose other bytes are in the next token."""
    return text.rstrip("\ufffd")
