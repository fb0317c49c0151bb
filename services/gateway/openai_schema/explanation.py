"""Why a request was served as it was: GET /v1/requests and below, and the field ``explanation`` of answers."""

from __future__ import annotations

from typing import Literal

import msgspec

from services.gateway.openai_schema.usage import ImportanceReport
from shared.messages.explanations import Reason, Source

PartName = Literal["accept", "broker", "queue", "deferral", "prefetch_wait", "load", "restore", "compute", "deliver"]
State = Literal["queued", "running", "finished", "failed", "cancelled"]


class TimePart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the time to first token. ``start_ms`` counts from when the HTTP request was complete."""

    name: PartName
    start_ms: float
    ms: float


class PromptPart(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens [start, end) of the prompt, and where their KV came from. ``reason`` says of computed ones why."""

    start: int
    end: int
    source: Source
    reason: Reason | None = None
    detail: str | None = None


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a request.

    ``parts`` are in order and make up ``ttft_ms``, which is null before the first token. ``prompt`` covers the prompt;
    it is empty before the request was admitted.
    """

    object: str = "request.explanation"
    id: str
    request_id: str
    namespace: str
    endpoint: str
    model: str
    created_ms: int
    state: State
    finish_reason: str | None
    error_code: str | None
    prompt_tokens: int
    completion_tokens: int
    attempts: int
    workers: list[str]
    ttft_ms: float | None
    total_ms: float | None
    parts: list[TimePart]
    prompt: list[PromptPart]
    importance: ImportanceReport | None = None


class ExplanationList(msgspec.Struct, frozen=True, kw_only=True):
    """Recent requests, the newest first."""

    object: str = "list"
    data: list[Explanation]
    has_more: bool
