"""/v1/responses: requests and the response object. Unknown fields are ignored, as in the other endpoints.

Known fields that would change the answer are read, so that they can be refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.openai_schema.chat import ChatFields
from services.gateway.openai_schema.sampling import Logprobs
from services.gateway.responses.items import Item, OutputItem

MAX_METADATA = 16

MetadataKey = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]
ResponseMetadata = Annotated[dict[MetadataKey, MetadataValue], Meta(max_length=MAX_METADATA)]


Word = Annotated[str, Meta(max_length=64)]


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of reasoning.

    ``effort`` is passed to templates with a variable ``reasoning_effort``. Reasoning is returned whole, so ``summary``
    is accepted and ignored.
    """

    effort: Word | None = None
    summary: Word | None = None


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The form of a text, by its type: ``text``, ``json_object`` or ``json_schema``, to which the other fields belong.

    The response repeats it and is kept with it, so other fields are dropped.
    """

    type: Word
    name: Word | None = None
    description: Annotated[str, Meta(max_length=4096)] | None = None
    schema: dict[str, Any] | None = None  # As long as a grammar may be.
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The form of the text. ``verbosity`` is accepted and ignored."""

    format: TextFormat | None = None
    verbosity: Word | None = None


class InputTokensRequest(ChatFields, frozen=True, kw_only=True):
    """The fields that make up the prompt, and those of a chat, which are checked."""

    input: str | Annotated[list[Item], Meta(min_length=1)]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    previous_response_id: Annotated[str, Meta(max_length=128)] | None = None
    truncation: str | None = None
    # Refused, since ignoring them would change the answer.
    background: Any = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    # Refused, since they have other names here.
    max_tokens: Any = None
    max_completion_tokens: Any = None
    logprobs: Any = None
    response_format: Any = None
    reasoning_effort: Any = None


class ResponsesRequest(InputTokensRequest, frozen=True, kw_only=True):
    """A conversation to continue."""

    store: bool | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    top_logprobs: Logprobs | None = None
    include: list[str] | None = None
    metadata: ResponseMetadata | None = None
    user: Annotated[str, Meta(max_length=1024)] | None = None
    safety_identifier: Annotated[str, Meta(max_length=1024)] | None = None


REFUSED_FIELDS = ("background", "conversation", "prompt", "context_management")
"""Fields that must be absent, null or false, besides those of a chat."""

INSTEAD = {
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of a chat, which are refused, and this API's own for the same."""


class InputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of the prompt's tokens: those found in the cache, and those added to it."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the output tokens that is reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(msgspec.Struct, frozen=True, kw_only=True):
    """The error of a failed response."""

    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Why an answer was cut off: always ``max_output_tokens``, also at the end of the context."""

    reason: Literal["max_output_tokens"]


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """An answer, whole or so far. ``store`` says whether it is kept; false where it could not be."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False] = False
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningOptions
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: TextOptions
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None


class ResponseDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """The confirmation that a kept response was erased."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of input_tokens: the number of the prompt's tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
