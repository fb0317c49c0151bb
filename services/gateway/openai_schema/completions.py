"""POST /v1/completions: request, response and stream chunk (one shape for both)."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from services.gateway.openai_schema.explanation import Explanation
from services.gateway.openai_schema.sampling import Choices, Logprobs, NotNegative, SamplingFields
from services.gateway.openai_schema.usage import PromptLogprob, TimingReport, UsageReport

MAX_PROMPTS = 1024

Prompt = str | Annotated[list[str | int | list[int]], Meta(min_length=1)]


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """A text to continue. ``prompt`` is a string, a list of strings, a list of token ids or a list of such lists."""

    prompt: Prompt
    max_tokens: NotNegative | None = None
    echo: bool | None = None
    best_of: Choices | None = None
    logprobs: Logprobs | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Lists of equal length, one entry a token. The first token of an echoed prompt has no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | UnsetType = UNSET


class CompletionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A whole response, or a chunk of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str | None = None
    usage: UsageReport | UnsetType | None = UNSET
    timing: TimingReport | UnsetType = UNSET
    explanation: Explanation | UnsetType | None = UNSET
