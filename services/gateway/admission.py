"""Whether a request is accepted, and the sampling parameters that it asks for. Pure; every refusal is a typed error.

Ranges of single fields are part of the schema. Checks here depend on the model or on several fields.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

from services.gateway.context_limit import ContextLimit
from services.gateway.model_facts import ModelFacts, SamplingDefaults
from services.gateway.openai_schema.chat import REFUSED_CHAT_FIELDS, ChatRequest
from services.gateway.openai_schema.completions import MAX_PROMPTS, CompletionRequest
from services.gateway.openai_schema.sampling import IMPORTANCE_FIELDS, REFUSED_FIELDS, CacheOptions, SamplingFields
from shared.errors import ContextTooLong, InvalidRequest
from shared.importance import METRICS
from shared.messages.requests import CacheHints, Grammar, Importance, SamplingParams
from shared.packed_tokens import PackedTokens

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions.

_SEED_MASK = 2**63 - 1

T = TypeVar("T")


def check_common(fields: SamplingFields) -> None:
    """Check the fields that chat and completion requests share. Raises InvalidRequest."""
    refuse(fields, REFUSED_FIELDS)
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    if fields.cache is not None:
        check_cache(fields.cache)


def refuse(fields: SamplingFields, names: Sequence[str]) -> None:
    """Raise InvalidRequest for the first of these fields that is neither absent nor null nor false."""
    for name in names:
        if asks(fields, name):
            raise unsupported(name)


def asks(fields: SamplingFields, name: str) -> bool:
    """Return whether a field asks for anything: whether it is neither absent nor null nor false."""
    value = getattr(fields, name)
    return value is not None and value is not False


def check_priority(asked: int | None, highest: int) -> int:
    """Return the priority of a request. Raises InvalidRequest for a higher one than its tenant may ask for."""
    if asked is not None and asked > highest:
        raise InvalidRequest(
            f"priority {asked} is higher than {highest}, the highest of this caller (max_priority of its tenant, "
            "--max-priority without one)",
            param="priority",
            code="priority_too_high",
        )
    return asked or 0


def check_cache(cache: CacheOptions) -> None:
    """Raise InvalidRequest for fields of ``cache`` that contradict one another, rather than guess which was meant."""
    if cache.fidelity != "importance":
        for name in IMPORTANCE_FIELDS:
            if getattr(cache, name) is not None:
                raise InvalidRequest(f"cache.{name} needs cache.fidelity to be 'importance'", param=f"cache.{name}")
        return
    if not cache.read:
        raise InvalidRequest(
            "fidelity importance loads cached prefixes, so cache.read must be true", param="cache.read"
        )
    if cache.metric is not None and cache.metric not in METRICS:
        raise InvalidRequest(
            f"there is no metric {cache.metric[:32]!r}; known are {', '.join(METRICS)}", param="cache.metric"
        )


def check_chat(request: ChatRequest) -> None:
    """Check the fields of a chat request that need no model. Raises InvalidRequest."""
    check_common(request)
    refuse(request, REFUSED_CHAT_FIELDS)
    if request.modalities is not None and set(request.modalities) != {"text"}:
        raise unsupported("modalities", "only text is served")
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    if request.continue_final_message and request.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    if request.continue_final_message and request.messages[-1].role != "assistant":
        raise InvalidRequest("continue_final_message needs a final assistant message", param="continue_final_message")


def check_completion(request: CompletionRequest) -> None:
    """Check the fields of a completion request that need no model. Raises InvalidRequest."""
    check_common(request)
    if request.suffix:
        raise unsupported("suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise InvalidRequest("best_of must equal n: choices are not ranked here", param="best_of")
    if request.max_tokens == 0 and not request.echo:
        raise InvalidRequest("max_tokens can be 0 only with echo", param="max_tokens")


def unsupported(param: str, why: str = "it is not served here") -> InvalidRequest:
    """Return the refusal of a parameter that other servers accept and this one does not."""
    return InvalidRequest(f"{param} is not supported: {why}", param=param, code="unsupported_parameter")


def unserved_content(kind: str, param: str) -> InvalidRequest:
    """Return the refusal of a part of a conversation that is not text."""
    return InvalidRequest(
        f"content of type {kind[:64]!r} is not served here; only text is",
        param=f"{param}.type",
        code="unsupported_content",
    )


def split_prompts(request: CompletionRequest, model_context: int) -> list[str | list[int]]:
    """Return the prompts of a completion request: texts, or lists of token ids.

    Raises InvalidRequest for a mixture, an empty prompt, and too many prompts; ContextTooLong for too many token ids.
    """
    prompt = request.prompt
    if isinstance(prompt, list) and isinstance(prompt[0], int):
        check_prompt_length(len(prompt), model_context)
    elif isinstance(prompt, list) and len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"{len(prompt)} prompts are more than {MAX_PROMPTS}", param="prompt")
    if isinstance(prompt, str):
        prompts: list[str | list[int]] = [prompt]
    elif all(isinstance(part, int) for part in prompt):
        prompts = [[part for part in prompt if isinstance(part, int)]]
    elif all(isinstance(part, str) for part in prompt) or all(isinstance(part, list) for part in prompt):
        prompts = [part for part in prompt if not isinstance(part, int)]
    else:
        raise InvalidRequest("prompt mixes texts, token ids and lists of token ids", param="prompt")
    for place, part in enumerate(prompts):
        if not part:
            raise InvalidRequest("a prompt must not be empty", param=_prompt_param(place, len(prompts)))
    return prompts


def check_prompt_tokens(tokens: Sequence[int], vocab_size: int, *, place: int = 0, count: int = 1) -> None:
    """Raise InvalidRequest for an empty prompt, or for a token id outside the vocabulary."""
    if not tokens:
        raise InvalidRequest("the prompt has no tokens", param=_prompt_param(place, count))
    check_vocabulary(tokens, vocab_size, param=_prompt_param(place, count))


def check_vocabulary(tokens: Sequence[int], vocab_size: int, *, param: str) -> None:
    """Raise InvalidRequest for a token id outside the vocabulary."""
    if not tokens:
        return
    least, most = tokens.bounds() if isinstance(tokens, PackedTokens) else (min(tokens), max(tokens))
    if least < 0 or most >= vocab_size:
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        raise InvalidRequest(f"token id {wrong} is outside the vocabulary of {vocab_size}", param=param)


def check_messages(count: int, model_context: int) -> None:
    """Raise ContextTooLong, before rendering, for more messages than the context has tokens.

    Each message costs at least one token.
    """
    if count > model_context:
        raise ContextTooLong(
            f"This model's maximum context length is {model_context} tokens; a conversation of {count} messages "
            "cannot fit.",
            param="messages",
        )


def check_prompt_length(count: int, model_context: int, *, param: str = "prompt") -> None:
    """Raise ContextTooLong for more token ids than the model's context, before each of them is checked."""
    if count > model_context:
        raise ContextTooLong(
            f"This model's maximum context length is {model_context} tokens; {count} token ids cannot fit.",
            param=param,
        )


def check_prompt_characters(
    characters: int, longest_token_characters: int, model_context: int, *, param: str = "prompt"
) -> None:
    """Raise ContextTooLong for a text that cannot fit, before it is tokenised: no token is longer than the longest one.

    The bound is doubled, since a tokenizer may first normalise a text to fewer characters. It is the model's context:
    whether pools hold less is checked in tokens, where the error can name the size that would hold them.
    """
    if characters > 2 * longest_token_characters * model_context:
        raise ContextTooLong(
            f"This model's maximum context length is {model_context} tokens; "
            f"a prompt of {characters} characters cannot fit.",
            param=param,
        )


def output_room(prompt_tokens: int, asked: int | None, default: int | None, limit: ContextLimit) -> int:
    """Return how many tokens may be generated. ``default`` None is the rest of the context.

    Raises ContextTooLong, naming both numbers, when prompt and answer cannot fit.
    """
    rest = limit.tokens - prompt_tokens
    wanted = asked if asked is not None else default
    if rest < 1:
        raise limit.refusal(
            prompt_tokens + (asked or 1),
            f". However, your prompt has {prompt_tokens} tokens, which leaves no room for an answer.",
            param="messages" if default is None else "prompt",
        )
    if wanted is None:
        return rest
    if wanted > rest and asked is not None:
        raise limit.refusal(
            prompt_tokens + wanted,
            f". However, you requested {prompt_tokens + wanted} tokens ({prompt_tokens} in the prompt, {wanted} in the "
            "answer).",
            param="max_tokens",
        )
    return min(wanted, rest)


def sampling_params(
    fields: SamplingFields,
    facts: ModelFacts,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: Grammar | None = None,
) -> SamplingParams:
    """Return the sampling parameters for the worker; ``seed`` is filled in per choice. Raises InvalidRequest."""
    defaults: SamplingDefaults = facts.defaults
    min_tokens = fields.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens {min_tokens} is more than max_tokens {max_tokens}", param="min_tokens")
    top_k = _given(fields.top_k, defaults.top_k)
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_given(fields.temperature, defaults.temperature),
        top_k=0 if top_k < 1 or top_k >= facts.vocab_size else top_k,
        top_p=_given(fields.top_p, defaults.top_p),
        min_p=_given(fields.min_p, defaults.min_p),
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=_given(fields.repetition_penalty, defaults.repetition_penalty),
        logit_bias=check_logit_bias(fields.logit_bias, facts.vocab_size) | dict.fromkeys(defaults.suppressed, NEVER),
        stop=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ()),
        stop_token_ids=_check_stop_token_ids(fields.stop_token_ids, facts.vocab_size),
        include_stop=bool(fields.include_stop_str_in_output),
        ignore_eos=bool(fields.ignore_eos),
        skip_special_tokens=fields.skip_special_tokens is not False,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )


NEVER = -1e9
"""Bias of a token that is not to be drawn: its probability is 0. Finite, since JSON has no infinity."""


def cache_hints(fields: SamplingFields, params: SamplingParams, importance: Importance | None = None) -> CacheHints:
    """Return the hints of the ``cache`` extension; without one, both reading and writing are on.

    Logprobs of a prompt need all of it computed, so nothing is read then. ``importance`` comes from ``fidelity``.
    """
    given = fields.cache or CacheOptions()
    return CacheHints(read=given.read and params.prompt_logprobs is None, write=given.write, importance=importance)


def check_logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    """Return biases by token id, in the request's order.

    Raises InvalidRequest for a key that is no decimal token id.
    """
    checked: dict[int, float] = {}
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10) or int(key) >= vocab_size:
            raise InvalidRequest(
                f"logit_bias: {key[:32]!r} is not a token id below {vocab_size}", param=f"logit_bias.{key[:32]}"
            )
        checked[int(key)] = float(value)
    return checked


def derive_seed(seed: int, choice: int) -> int:
    """Return the seed of choice ``choice`` (from 0) of one prompt, in [0, 2**63). Choice 0 has the caller's own."""
    if choice == 0:
        return seed & _SEED_MASK
    text = f"thermocline-choice-seed-1:{seed}:{choice}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") & _SEED_MASK


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


def _check_stop_token_ids(ids: list[int] | None, vocab_size: int) -> tuple[int, ...]:
    for token in ids or ():
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"stop token id {token} is outside the vocabulary", param="stop_token_ids")
    return tuple(ids or ())


def _prompt_param(place: int, count: int) -> str:
    return "prompt" if count == 1 else f"prompt[{place}]"
