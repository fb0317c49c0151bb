"""POST /v1/messages and /v1/messages/count_tokens: requests. Unknown fields are ignored, since betas come and go.

Known fields that would change the answer are read, so that they can be refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.openai_schema.chat import ChatFields
from services.gateway.openai_schema.leases import CacheControl
from services.gateway.openai_schema.sampling import StopStrings


class ResultPart(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One part of a tool's result; only ``text`` is served."""

    type: str
    text: str | None = None
    cache_control: CacheControl | None = None


class InputBlock(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One block of a message: ``text``, ``tool_use``, ``tool_result``, ``thinking`` or ``redacted_thinking``.

    ``thinking`` is given back to the model where its template has a place for it; ``redacted_thinking`` and signatures
    do not come from this server and are ignored.
    """

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ResultPart] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class InputMessage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock]


class SystemPart(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One part of the system prompt; only ``text`` is served."""

    type: str
    text: str | None = None
    cache_control: CacheControl | None = None


class MessagesTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that the client runs. ``type`` is absent or ``custom``; Anthropic's own tools are refused."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class MessagesToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Which tools the model may call. ``name`` belongs only to ``tool``."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """The switch for reasoning. ``budget_tokens`` is accepted and ignored: templates have a switch, no budget."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The form of the answer: JSON by a schema."""

    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Effort and form of the answer. ``effort`` is passed to templates with a variable ``reasoning_effort``."""

    effort: str | None = None
    format: OutputFormat | None = None


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the caller; ``user_id`` is accepted as OpenAI's ``user`` is."""

    user_id: Annotated[str, Meta(max_length=1024)] | None = None


class MessageThread(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the conversation is kept under the answer's id, and which kept one it continues."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None


class CountTokensRequest(ChatFields, frozen=True, kw_only=True):
    """The fields that make up the prompt, and those of a chat, which are checked."""

    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    system: str | list[SystemPart] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    context_management: Any = None
    # Refused, since ignoring them would change the prompt or the answer.
    container: Any = None
    mcp_servers: Any = None
    thread: Any = None
    compaction: Any = None
    fallbacks: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    # Refused, since they have other names here.
    max_completion_tokens: Any = None
    response_format: Any = None
    output_format: Any = None
    reasoning_effort: Any = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """A conversation to continue; with ``max_tokens`` 0, one whose prompt is only to be cached."""

    max_tokens: Annotated[int, Meta(ge=0)]
    stop_sequences: StopStrings | None = None
    metadata: Metadata | None = None
    thread: MessageThread | None = None


REFUSED_FIELDS = ("container", "mcp_servers", "thread", "compaction", "fallbacks", "logprobs", "top_logprobs")
"""Fields that must be absent, null, false or an empty list, besides those of a chat."""

INSTEAD = {
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "output_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
}
"""Fields of a chat and of an earlier version, which are refused, and the API's own for the same."""
