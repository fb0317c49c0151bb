"""Answers and events of the Messages API."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

UNFINISHED = "INVALID_JSON"
"""The only field of a tool's input if its arguments are no JSON object, usually because the answer was cut off."""

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextBlock(msgspec.Struct, frozen=True, kw_only=True, tag="text"):
    """Visible text of an answer, without ``citations``: Vercel's AI SDK takes no null for them."""

    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, kw_only=True, tag="thinking"):
    """Reasoning of an answer. ``signature`` is a constant and is not checked when it is sent back."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, frozen=True, kw_only=True, tag="tool_use"):
    """A call of a tool; ``input`` is the object of its arguments."""

    id: str
    name: str
    input: dict[str, Any]


OutputBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessagesOutputDetails(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the output tokens that is reasoning."""

    thinking_tokens: int


class CacheCreation(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens written to the cache, by the time for which they are leased."""

    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class MessagesUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a request. The prompt is ``input_tokens`` and both of the cache's together."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation: CacheCreation
    output_tokens_details: MessagesOutputDetails
    service_tier: Literal["standard"] = "standard"


class MessagesResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer, or its beginning in the event ``message_start``."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[OutputBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of count_tokens: the number of the prompt's tokens."""

    input_tokens: int


class TextDelta(msgspec.Struct, frozen=True, kw_only=True, tag="text_delta"):
    """Visible text that a block grew by."""

    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, kw_only=True, tag="thinking_delta"):
    """Reasoning that a block grew by."""

    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, kw_only=True, tag="signature_delta"):
    """The signature of a block of reasoning, sent before the block ends."""

    signature: str


class InputJsonDelta(msgspec.Struct, frozen=True, kw_only=True, tag="input_json_delta"):
    """JSON text that a call's arguments grew by."""

    partial_json: str


class StopDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The reason for an answer's end; ``stop_sequence`` is the one that was met, else null."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageStart(msgspec.Struct, frozen=True, kw_only=True, tag="message_start"):
    """The first event: the answer without content."""

    message: MessagesResponse


class BlockStart(msgspec.Struct, frozen=True, kw_only=True, tag="content_block_start"):
    """The event that begins block ``index``, without its content."""

    index: int
    content_block: OutputBlock


class BlockDelta(msgspec.Struct, frozen=True, kw_only=True, tag="content_block_delta"):
    """The event that adds content to block ``index``."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockStop(msgspec.Struct, frozen=True, kw_only=True, tag="content_block_stop"):
    """The event that ends block ``index``."""

    index: int


class MessageDelta(msgspec.Struct, frozen=True, kw_only=True, tag="message_delta"):
    """The event at the end of the content: the reason for the end, and the final usage."""

    delta: StopDelta
    usage: MessagesUsage


class MessageStop(msgspec.Struct, frozen=True, kw_only=True, tag="message_stop"):
    """The last event of an answer."""


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag="ping"):
    """An event without content, sent after the first one and to keep a quiet stream open."""


EVENTS = (MessageStart, BlockStart, BlockDelta, BlockStop, MessageDelta, MessageStop, Ping)
