"""Request fields that all endpoints of generation share. Unknown fields are ignored, as in vLLM."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from services.gateway.openai_schema.leases import CacheKey, Retention, ReturnsIn
from shared.importance import LEAST_RATIO
from shared.messages.requests import MAX_GRAMMAR_BYTES

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 1024
MAX_PRIORITY = 1000
MAX_OPTIONS = 1000

Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=2)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
NotNegative = Annotated[int, Meta(ge=0)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
StopStrings = Annotated[list[StopString], Meta(max_length=MAX_STOPS)]
StopTokenIds = Annotated[list[int], Meta(max_length=MAX_STOP_TOKEN_IDS)]
LogitBias = Annotated[dict[str, Bias], Meta(max_length=MAX_LOGIT_BIASES)]
Ratio = Annotated[float, Meta(ge=LEAST_RATIO, le=1)]
KeptTokens = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's ``stream_options``; ``continuous_usage_stats`` puts usage into every chunk, as in vLLM."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CacheOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Extension ``cache``: whether this request may use cached prefixes and leave its own, and how exactly.

    Without ``fidelity`` the deployment's default applies. Fields after it belong to fidelity ``importance``
    (``shared.messages.requests.Importance``), except ``returns_in_s``.
    """

    read: bool = True
    write: bool = True
    fidelity: Literal["exact", "importance"] | None = None
    ratio: Ratio | None = None
    metric: str | None = None  # Checked in ``admission``, whose refusal names those that exist.
    first_tokens: KeptTokens | None = None
    recent_tokens: KeptTokens | None = None
    returns_in_s: ReturnsIn | None = None  # Expected seconds from the answer to the session's next request.


IMPORTANCE_FIELDS = ("ratio", "metric", "first_tokens", "recent_tokens")
"""Fields of ``cache`` that are valid only with fidelity ``importance``."""


Schema = dict[str, Any] | str
Pattern = Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_BYTES)]
Options = Annotated[list[str], Meta(min_length=1, max_length=MAX_OPTIONS)]
WrittenGrammar = Annotated[str, Meta(min_length=1, max_length=MAX_GRAMMAR_BYTES)]


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's ``structured_outputs``: one of the first five constrains the answer."""

    json: Schema | None = None
    regex: Pattern | None = None
    choice: Options | None = None
    grammar: WrittenGrammar | None = None
    json_object: bool | None = None
    # Refused, since ignoring them would change the answer.
    structural_tag: Any = None
    whitespace_pattern: Any = None
    disable_any_whitespace: Any = None
    disable_additional_properties: Any = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all request types; None always means "not given"."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None
    stop: StopString | StopStrings | None = None
    logit_bias: LogitBias | None = None
    user: str | None = None
    # Extensions that vLLM's users know.
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    min_tokens: NotNegative | None = None
    ignore_eos: bool | None = None
    stop_token_ids: StopTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Logprobs | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    prompt_cache_key: CacheKey | None = None
    prompt_cache_retention: Retention | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Pattern | None = None
    guided_choice: Options | None = None
    guided_grammar: WrittenGrammar | None = None
    # Extensions of Thermocline.
    cache: CacheOptions | None = None
    deadline_ms: Annotated[int, Meta(ge=1, le=86_400_000)] | None = None
    timing: bool | None = None
    explain: bool | None = None
    # Known to other servers and not offered here: refused, since ignoring them would change the answer.
    use_beam_search: bool | None = None
    guided_whitespace_pattern: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    logits_processors: Any = None
    truncate_prompt_tokens: Any = None
    prompt_embeds: Any = None
    lora: Any = None
    lora_path: Any = None
    thinking: Any = None


REFUSED_FIELDS = (
    "use_beam_search",
    *(
        "guided_whitespace_pattern",
        "json_schema",
        "regex",
        "ebnf",
        "bad_words",
        "allowed_token_ids",
        "logits_processors",
    ),
    *("truncate_prompt_tokens", "prompt_embeds", "lora", "lora_path", "thinking"),
)
"""Fields that must be absent, null or false."""
