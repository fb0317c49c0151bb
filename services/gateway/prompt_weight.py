"""The amount of text in a prompt, which decides whether it is tokenised at once, in a thread, or refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from services.gateway.openai_schema.chat import ChatMessage, ChatRequest

INLINE_CHARACTERS = 2_000
"""A shorter text is tokenised at once: handing it to a thread would cost more. So is a longer one if no more of it is
new.
"""

LIGHT_CHARACTERS = 20_000
LIGHT_MESSAGES = 16
"""A conversation up to both bounds is rendered, and looked up among known texts, in half a millisecond."""

LONG_CHARACTERS = 200_000
"""A longer text waits only for other long ones, and no shorter text waits for it. About 50,000 tokens."""

MANY_MESSAGES = 2_000
"""More messages count as a long text, whatever they contain."""

MESSAGE_CHARACTERS = 100
"""Cost of rendering one message, or one part of its content, besides its text, in characters."""

VALUE_CHARACTERS = 50
"""Cost of rendering a value within a tool, a call or an argument of the template, in characters."""


def weight(request: ChatRequest) -> int:
    """Return roughly how many characters are rendered for a conversation: once more for each breakpoint in it.

    Anything but plain content counts as more than a small text. Counting ends beyond :data:`LONG_CHARACTERS`, and each
    value counts for something, so that this takes two or three milliseconds at most, whatever a client sent.
    """
    if len(request.messages) > MANY_MESSAGES:
        return LONG_CHARACTERS + 1
    is_plain = not request.tools and not request.chat_template_kwargs
    total, renderings = 0 if is_plain else INLINE_CHARACTERS, 1
    for counted, has_breakpoint in _pieces(request):
        total += counted
        renderings += has_breakpoint
        if total * renderings > LONG_CHARACTERS:
            return LONG_CHARACTERS + 1
    return total * renderings


def is_light(request: ChatRequest, characters: int) -> bool:
    """Return whether a conversation of this :func:`weight` is rendered at once, and tokenised too if little is new."""
    return characters <= LIGHT_CHARACTERS and len(request.messages) <= LIGHT_MESSAGES and not request.tools


def _pieces(request: ChatRequest) -> Iterator[tuple[int, bool]]:
    """Yield the characters of each rendered piece, and whether a breakpoint stands behind it."""
    yield len(request.reasoning_effort or ""), False
    for counted in _values(request.chat_template_kwargs or {}):
        yield counted, False
    for tool in request.tools or ():
        yield 0, tool.get("cache_control") is not None
        for counted in _values(tool):
            yield counted, False
    has_calls = False
    for message in request.messages:
        yield from _content(message)
        for call in message.tool_calls or ():
            if not has_calls:
                yield INLINE_CHARACTERS, False
            has_calls = True
            for counted in _values(call):
                yield counted, False


def _content(message: ChatMessage) -> Iterator[tuple[int, bool]]:
    said = (message.reasoning_content, message.reasoning, message.refusal, message.name, message.tool_call_id)
    yield MESSAGE_CHARACTERS + sum(len(text) for text in said if text), message.cache_control is not None
    if isinstance(message.content, str):
        yield len(message.content), False
    for part in message.content if isinstance(message.content, list) else ():
        yield MESSAGE_CHARACTERS + len(part.text or part.refusal or ""), part.cache_control is not None


def _values(value: object) -> Iterator[int]:
    """Yield the characters of each value of JSON, one by one: a list of a million is not scanned at once."""
    left: list[Iterator[object]] = [iter((value,))]
    while left:
        for each in left[-1]:
            yield VALUE_CHARACTERS + (len(each) if isinstance(each, str) else 0)
            if isinstance(each, dict):
                left.append(itertools.chain(each, each.values()))
                break
            if isinstance(each, list):
                left.append(iter(each))
                break
        else:
            left.pop()


def characters(*rendered: object) -> int:
    """Return the characters of all texts, names of fields included, in a template's arguments."""
    total, left = 0, list(rendered)
    while left:
        value = left.pop()
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, Mapping):
            left += value
            left += value.values()
        elif isinstance(value, list):
            left += value
    return total
