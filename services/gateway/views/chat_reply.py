"""An answer's parts in the shapes of chat completions. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from services.gateway.openai_schema.chat import (
    AnswerDelta,
    AnswerFunction,
    AnswerMessage,
    AnswerToolCall,
    FunctionDelta,
    ToolCallDelta,
)
from services.gateway.replies.parts import CallArguments, CallBegun, Reasoning, ReplyPart, Text


def answer_message(parts: Sequence[ReplyPart]) -> AnswerMessage:
    """Return the message of a whole answer."""
    text, reasoning = _joined(parts, Text), _joined(parts, Reasoning)
    calls = [
        AnswerToolCall(
            id=part.call_id, function=AnswerFunction(name=part.name, arguments=_arguments(parts, part.index))
        )
        for part in parts
        if isinstance(part, CallBegun)
    ]
    return AnswerMessage(
        content=text if text or not (reasoning or calls) else None,
        reasoning_content=reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def answer_delta(parts: Sequence[ReplyPart]) -> AnswerDelta:
    """Return what these parts add to a message; a call has one entry, however many parts describe it."""
    calls: dict[int, ToolCallDelta] = {}
    for part in parts:
        if isinstance(part, CallBegun):
            arguments = _arguments(parts, part.index)
            calls[part.index] = ToolCallDelta(
                index=part.index,
                id=part.call_id,
                type="function",
                function=FunctionDelta(name=part.name, arguments=arguments),
            )
        elif isinstance(part, CallArguments) and part.index not in calls:
            calls[part.index] = ToolCallDelta(
                index=part.index, function=FunctionDelta(arguments=_arguments(parts, part.index))
            )
    return AnswerDelta(
        content=_joined(parts, Text) or UNSET,
        reasoning_content=_joined(parts, Reasoning) or UNSET,
        tool_calls=list(calls.values()) or UNSET,
    )


def _joined(parts: Sequence[ReplyPart], kind: type[Text | Reasoning]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))


def _arguments(parts: Sequence[ReplyPart], index: int) -> str:
    return "".join(part.text for part in parts if isinstance(part, CallArguments) and part.index == index)
