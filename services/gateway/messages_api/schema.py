"""POST /v1/messages and /v1/messages/count_tokens: requests. Unknown fields are ignored, since betas come and go.

Known fields that would change the answer are read, so that they can be refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.openai_schema.leases import CacheControl
from services.gateway.openai_schema.sampling import (
    MAX_PRIORITY,
    CacheOptions,
    Seed,
    StopStrings,
    TopK,
    TopP,
)

Salt = Annotated[str, Meta(min_length=1, max_length=256)]


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

    type: str
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


class CountTokensRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that make up the prompt."""

    model: str | None = None
    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    system: str | list[SystemPart] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    # Refused, since ignoring them would change the prompt.
    container: Any = None
    context_management: Any = None
    mcp_servers: Any = None


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """A conversation to continue."""

    max_tokens: Annotated[int, Meta(ge=1)]
    stream: bool | None = None
    stop_sequences: StopStrings | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    metadata: Metadata | None = None
    # Extensions, as in the other endpoints.
    seed: Seed | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    cache_salt: Salt | None = None
    cache: CacheOptions | None = None
    deadline_ms: Annotated[int, Meta(ge=1, le=86_400_000)] | None = None
