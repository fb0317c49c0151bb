"""Why a request was served as it was: GET /v1/requests and below, and the field ``explanation`` of answers."""

from __future__ import annotations

from typing import Literal

import msgspec

from services.gateway.openai_schema.usage import ImportanceReport
from shared.messages.explanations import CostName, PointKind, Reason, Source, WayName

PartName = Literal["accept", "broker", "queue", "deferral", "prefetch_wait", "load", "restore", "compute", "deliver"]
Part = Literal["message", "tools", "template", "generation_prompt"]
State = Literal["queued", "running", "finished", "failed", "cancelled"]


Cause = Literal[
    "whitespace",  # Only spaces or line breaks differ.
    "tools_reordered",  # The same tools in another order.
    "tools_changed",  # Other tools, or other descriptions.
    "date_or_time",
    "identifier",  # Of a request, session or user: a UUID or a text that looks like one.
    "number",  # A counter, or another number.
    "template_variable",  # The chat template's own text, such as that of enable_thinking.
    "system_prompt",  # The system message was edited.
    "answer_changed",  # An earlier answer differs from how it was generated.
    "tool_result",
    "other_conversation",  # The first user message differs: nothing is wrong.
    "other_turn",  # A later user message differs, as after editing one: nothing is wrong.
    "unknown",
]


class TimePart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the time to first token. ``start_ms`` counts from the completion of the HTTP request."""

    name: PartName
    start_ms: float
    ms: float


class PromptPart(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens [start, end) of the prompt, and where their KV came from. ``reason`` says why tokens were computed."""

    start: int
    end: int
    source: Source
    reason: Reason | None = None
    detail: str | None = None


class WayPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a way's predicted time, and the bytes that it reads.

    ``took_ms`` is how long computation waited for it, where that was reported.
    """

    name: CostName
    ms: float
    bytes: int | None = None
    took_ms: float | None = None


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """A way to restore the prefix that was compared with others. ``parts`` add up to ``ms``, the predicted time."""

    way: WayName
    taken: bool
    ms: float
    parts: list[WayPart]


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """The point at which the prompt leaves the nearest cached path.

    It is at ``token``, in ``message`` (from 0) or another ``part``. ``before`` is the text that both have, ``prompt``
    and ``cached`` the text that follows in each; ``cached`` and ``lost_tokens`` are null for callers who may not see
    them. ``lost_tokens`` were computed although the cached path has them too, in about ``lost_ms``.
    """

    kind: PointKind
    token: int | None
    part: Part | None
    message: int | None
    role: str | None
    before: str | None
    prompt: str | None
    cached: str | None
    cause: Cause | None
    lost_tokens: int | None
    lost_ms: float | None


class CostlyDivergence(msgspec.Struct, frozen=True, kw_only=True):
    """A point at which ``requests`` prompts left the cache, described by the latest of them.

    ``lost_tokens`` may be up to ``error_tokens`` too many. Texts and cause are null where no tokenizer is available.
    """

    namespace: str
    token: int
    before: str | None
    prompt: str | None
    cached: str | None
    cause: Cause | None
    requests: int
    lost_tokens: int
    error_tokens: int
    lost_ms: float | None
    request_id: str
    last_ms: int  # Milliseconds since 1970.


class CostlyDivergences(msgspec.Struct, frozen=True, kw_only=True):
    """The points that cost most prefill since ``since_ms``, the costliest first."""

    object: str = "list"
    data: list[CostlyDivergence]
    since_ms: int | None


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
    ways: list[Way] = []
    importance: ImportanceReport | None = None
    divergence: Divergence | None = None


class ExplanationList(msgspec.Struct, frozen=True, kw_only=True):
    """Recent requests, the newest first."""

    object: str = "list"
    data: list[Explanation]
    has_more: bool
