"""POST /v1/chat/completions: request, response and stream chunk."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from services.gateway.openai_schema.explanation import Explanation
from services.gateway.openai_schema.leases import CacheControl
from services.gateway.openai_schema.sampling import Logprobs, SamplingFields
from services.gateway.openai_schema.usage import PromptLogprob, TimingReport, UsageReport

Positive = Annotated[int, Meta(ge=1)]


# No gc: JSON has no cycles, and scanning a conversation of 100,000 messages for them takes long.


class ContentPart(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One part of a message's content; only ``text``, and an assistant's ``refusal``, are served."""

    type: str
    text: str | None = None
    cache_control: CacheControl | None = None
    refusal: str | None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One message of the conversation. An assistant's ``function_call``, ``audio`` and ``prefix`` are refused."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    cache_control: CacheControl | None = None  # For content that is one text.
    reasoning_content: str | None = None
    reasoning: str | None = None  # The name that newer clients use for ``reasoning_content``.
    function_call: Any = None
    audio: Any = None
    prefix: Any = None  # By which clients of Mistral and DeepSeek ask to continue the message.


class ChatFields(SamplingFields, frozen=True, kw_only=True):
    """Fields with one name in all APIs of conversations: requests of the newer two hand them to their chat."""

    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Refused, as those of the base class.
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    echo: Any = None
    chat_template: Any = None
    documents: Any = None
    moderation: Any = None
    web_search_options: Any = None


REFUSED_CHAT_FIELDS = (
    *("functions", "function_call", "audio", "echo", "chat_template", "documents"),
    *("moderation", "web_search_options"),
)
"""Fields of a chat that must be absent, null or false."""


class ChatRequest(ChatFields, frozen=True, kw_only=True):
    """A conversation to continue."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None  # For templates that have a variable of this name.


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One of the most likely tokens at a position."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """The logprob of an answer's token. ``bytes`` are the token's own, which may be part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Logprobs of a choice or chunk, one entry a token; ``refusal`` is always null."""

    content: list[ChatLogprob]
    refusal: None = None


class AnswerFunction(msgspec.Struct, frozen=True, kw_only=True):
    """The function of a call. ``arguments`` is JSON text as the model wrote it, and may be invalid."""

    name: str
    arguments: str


class AnswerToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a tool in a whole answer."""

    id: str
    type: Literal["function"] = "function"
    function: AnswerFunction


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The message of an answer. ``content`` is null where it has only reasoning or calls."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnswerToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a whole answer. ``stop_reason`` is the stop text or token that was met, as in vLLM."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer. Fields after ``system_fingerprint`` are present only if asked for."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReport
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET
    timing: TimingReport | UnsetType = UNSET
    explanation: Explanation | UnsetType | None = UNSET


class FunctionDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The name of a function, in a call's first delta, or more of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """An addition to a call. The first has ``id``, ``type`` and the name; each has more of its arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class AnswerDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Additions of a chunk to a message; ``role`` is in a choice's first chunk."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Additions of a chunk to one choice; the reasons are in its last chunk."""

    index: int
    delta: AnswerDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a streamed answer."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET
    usage: UsageReport | UnsetType | None = UNSET
    timing: TimingReport | UnsetType = UNSET
    explanation: Explanation | UnsetType | None = UNSET
