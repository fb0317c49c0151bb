"""What the views of all endpoints have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from services.gateway import sse
from services.gateway.assembly import Delta
from services.gateway.model_facts import ModelFacts
from services.gateway.openai_schema.explanation import Explanation
from services.gateway.openai_schema.sampling import SamplingFields
from services.gateway.pending import Choice, Generation
from shared.errors import ThermoclineError


@dataclass(frozen=True, slots=True)
class Head:
    """Fields that every response and chunk repeats."""

    id: str
    created: int  # Unix seconds.
    model: str
    system_fingerprint: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """Optional parts that the caller asked for."""

    logprobs: int | None = None
    prompt_logprobs: bool = False
    token_ids: bool = False
    timing: bool = False
    explanation: bool = False
    usage_chunk: bool = False
    continuous_usage: bool = False

    @property
    def last_chunk(self) -> bool:
        """Whether a stream ends with a chunk without choices."""
        return self.usage_chunk or self.timing or self.explanation

    @property
    def tokens_matter(self) -> bool:
        """Whether a chunk without text still says something."""
        return self.token_ids or self.logprobs is not None or self.continuous_usage


class AnswerView(Protocol):
    """How an endpoint writes its answer. ``explanation`` is given before its end, where it is wanted and can be had."""

    explanation: Explanation | None

    @property
    def framing(self) -> sse.Framing:
        """How chunks become events of a stream."""

    @property
    def wants_explanation(self) -> bool:
        """Whether the caller asked for an explanation."""

    def opening(self) -> list[bytes]:
        """Chunks before any token, as JSON."""

    def chunk(self, choice: Choice, delta: Delta) -> bytes | None:
        """Return the chunk for new tokens of one choice; None when there is nothing to send."""

    def closing(self) -> list[bytes]:
        """Chunks after the last token."""

    def failed(self, error: ThermoclineError) -> bytes:
        """Events in place of those of ``closing``, framed, for an answer that cannot be completed."""

    def whole(self) -> bytes:
        """Return the body of an answer that is not streamed; takes the choices' tokens."""


class DataEvents:
    """How views of completions and chats write their events."""

    framing = sse.DATA_ONLY

    def failed(self, error: ThermoclineError) -> bytes:
        return sse.error_event(error)


def head_of(answer_id: str, created: int, facts: ModelFacts, model: str) -> Head:
    """``model`` is the name that was asked for."""
    return Head(answer_id, created, model, f"fp_{facts.answer_fingerprint[:12]}")


def wanted_by(fields: SamplingFields, logprobs: int | None) -> Wanted:
    """Return the optional parts of a request; ``logprobs`` is the endpoint's own number."""
    options = fields.stream_options
    return Wanted(
        logprobs=logprobs,
        prompt_logprobs=fields.prompt_logprobs is not None,
        token_ids=bool(fields.return_token_ids),
        timing=bool(fields.timing),
        explanation=bool(fields.explain),
        usage_chunk=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
    )


def first_choices(generation: Generation) -> list[Choice]:
    """Return the first choice of each prompt."""
    seen: dict[int, Choice] = {}
    for choice in generation.choices:
        seen.setdefault(choice.prompt, choice)
    return list(seen.values())
