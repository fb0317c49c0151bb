"""Parts that the views of all endpoints share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import UNSET, UnsetType

from services.gateway import sse
from services.gateway.assembly import Delta
from services.gateway.model_facts import ModelFacts
from services.gateway.openai_schema.explanation import Explanation
from services.gateway.openai_schema.sampling import SamplingFields
from services.gateway.openai_schema.usage import PromptLogprob, TimingReport
from services.gateway.pending import Choice, Generation
from services.gateway.token_text import TokenTexts
from services.gateway.views.chunk_template import TextTemplate
from services.gateway.views.logprobs import prompt_logprob_list
from services.gateway.views.usage import timing_report
from shared.errors import ThermoclineError
from shared.messages.tokens import TokenLogprob


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that every response and chunk repeats."""

    id: str
    created: int  # Unix seconds.
    model: str
    system_fingerprint: str


@dataclass(frozen=True, slots=True)
class Wanted:
    """The optional parts that the caller asked for."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
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
        """Whether a chunk without text still has content."""
        return self.token_ids or self.logprobs is not None or self.continuous_usage


class AnswerView(Protocol):
    """The writer of an endpoint's answer.

    ``explanation`` is set before the end, if it was asked for and is available.
    """

    explanation: Explanation | None

    @property
    def framing(self) -> sse.Framing:
        """The form in which chunks become events of a stream."""

    @property
    def wants_explanation(self) -> bool:
        """Whether the caller asked for an explanation."""

    def prepare(self) -> None:
        """Make what needs no token, while the answer to a stream waits for its first one."""

    def opening(self) -> list[bytes]:
        """Return the chunks before any token, as JSON."""

    def chunk(self, choice: Choice, delta: Delta) -> bytes | None:
        """Return the chunk for new tokens of one choice; None when there is nothing to send."""

    def closing(self) -> list[bytes]:
        """Return the chunks after the last token."""

    def failed(self, error: ThermoclineError) -> bytes:
        """Return framed events in place of those of ``closing``, for an answer that cannot be completed."""

    def whole(self) -> bytes:
        """Return the body of an answer that is not streamed; takes the choices' tokens."""


class DataEvents:
    """The base of the views of completions and chats: events without names, ended by ``[DONE]``."""

    framing = sse.DATA_ONLY

    def __init__(
        self, generation: Generation, head: Head, wanted: Wanted, texts: TokenTexts, now_ns: Callable[[], int]
    ) -> None:
        """Write ``generation`` with the parts that are ``wanted``.

        ``texts`` are used for logprobs alone. ``now_ns`` is the wall clock.
        """
        self._generation = generation
        self._head = head
        self._wanted = wanted
        self._texts = texts
        self._now_ns = now_ns
        self.explanation: Explanation | None = None
        self._templates: dict[int, TextTemplate] = {}  # By position.

    @property
    def wants_explanation(self) -> bool:
        """Whether the request has ``explain``."""
        return self._wanted.explanation

    def prepare(self) -> None:
        """Make nothing."""

    def _prompt_logprobs(
        self, found: Sequence[TokenLogprob | None] | None
    ) -> list[dict[str, PromptLogprob] | None] | UnsetType:
        top = self._wanted.prompt_logprobs
        return UNSET if found is None or top is None else prompt_logprob_list(found, top, self._texts)

    def _timing(self, *, is_last: bool) -> TimingReport | UnsetType:
        first = self._generation.choices[0]
        if not (is_last and self._wanted.timing):
            return UNSET
        return timing_report(first.assembly.timing, first.request.received_ns, self._now_ns())

    def failed(self, error: ThermoclineError) -> bytes:
        """Return the error as one event, in OpenAI's shape."""
        return sse.error_event(error)


def head_of(answer_id: str, created: int, facts: ModelFacts, model: str) -> Head:
    """Return the repeated fields; ``created`` is in Unix seconds, ``model`` the name that was asked for."""
    return Head(answer_id, created, model, f"fp_{facts.answer_fingerprint[:12]}")


def wanted_by(fields: SamplingFields, logprobs: int | None) -> Wanted:
    """Return the optional parts of a request; ``logprobs`` is the number in the endpoint's own field."""
    options = fields.stream_options
    return Wanted(
        logprobs=logprobs,
        prompt_logprobs=fields.prompt_logprobs,
        token_ids=bool(fields.return_token_ids),
        timing=bool(fields.timing),
        explanation=bool(fields.explain),
        usage_chunk=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
    )
