"""Answers and events of the Messages API."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

UNFINISHED = "INVALID_JSON"
"""The one field of a tool's input whose arguments are no JSON object, most often because the answer was cut off."""

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class TextBlock(msgspec.Struct, frozen=True, kw_only=True, tag="text"):
    text: str
    citations: None = None


class ThinkingBlock(msgspec.Struct, frozen=True, kw_only=True, tag="thinking"):
    """``signature`` proves nothing here and is not looked at when it comes back."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, frozen=True, kw_only=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


OutputBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessagesOutputDetails(msgspec.Struct, frozen=True, kw_only=True):
    thinking_tokens: int


class CacheCreation(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens written, by how long they are to be kept."""

    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class MessagesUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt's tokens are ``input_tokens`` and both of the cache's together."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation: CacheCreation
    output_tokens_details: MessagesOutputDetails
    service_tier: Literal["standard"] = "standard"


class MessagesResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer; in the event ``message_start`` its beginning."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[OutputBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int


class TextDelta(msgspec.Struct, frozen=True, kw_only=True, tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, kw_only=True, tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, kw_only=True, tag="signature_delta"):
    signature: str


class InputJsonDelta(msgspec.Struct, frozen=True, kw_only=True, tag="input_json_delta"):
    partial_json: str


class StopDelta(msgspec.Struct, frozen=True, kw_only=True):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageStart(msgspec.Struct, frozen=True, kw_only=True, tag="message_start"):
    message: MessagesResponse


class BlockStart(msgspec.Struct, frozen=True, kw_only=True, tag="content_block_start"):
    index: int
    content_block: OutputBlock


class BlockDelta(msgspec.Struct, frozen=True, kw_only=True, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockStop(msgspec.Struct, frozen=True, kw_only=True, tag="content_block_stop"):
    index: int


class MessageDelta(msgspec.Struct, frozen=True, kw_only=True, tag="message_delta"):
    delta: StopDelta
    usage: MessagesUsage


class MessageStop(msgspec.Struct, frozen=True, kw_only=True, tag="message_stop"):
    pass


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag="ping"):
    pass


EVENTS = (MessageStart, BlockStart, BlockDelta, BlockStop, MessageDelta, MessageStop, Ping)
