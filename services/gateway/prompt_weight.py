"""How much text a prompt is, before it is tokenised: at once, in a thread, or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.gateway.openai_schema.chat import ChatMessage, ChatRequest

INLINE_CHARACTERS = 2_000
"""A shorter text is tokenised at once: handing it to a thread would cost more."""

LONG_CHARACTERS = 200_000
"""A longer text waits for other long ones alone, and nothing shorter waits for it. About 50,000 tokens."""

MANY_MESSAGES = 2_000
"""As many messages are a long text, whatever is in them."""

MESSAGE_CHARACTERS = 100
"""What rendering one message costs beside its content, in characters."""


def weight(request: ChatRequest) -> int:
    """How many characters a conversation has, roughly and quickly: what is not plain content counts as a long text."""
    if request.tools or request.chat_template_kwargs:
        return INLINE_CHARACTERS + _content_weight(request.messages)
    return _content_weight(request.messages)


def _content_weight(messages: Sequence[ChatMessage]) -> int:
    if len(messages) > MANY_MESSAGES:
        return LONG_CHARACTERS + 1
    total = 0
    for message in messages:
        total += MESSAGE_CHARACTERS
        if isinstance(message.content, str):
            total += len(message.content)
        elif message.content is not None:
            total += sum(MESSAGE_CHARACTERS + len(part.text or "") for part in message.content)
        if message.tool_calls is not None:
            total += INLINE_CHARACTERS
        total += sum(len(said) for said in (message.reasoning_content, message.reasoning, message.refusal) if said)
    return total


def characters(*rendered: object) -> int:
    """Characters of all texts, names of fields included, in what a template is given."""
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
