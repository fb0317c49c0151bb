"""What is refused, why, and what the worker is told otherwise."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from services.gateway import admission
from services.gateway.context_limit import ContextLimit
from services.gateway.model_facts import ModelFacts, SamplingDefaults
from services.gateway.openai_schema.chat import ChatRequest
from services.gateway.openai_schema.completions import MAX_PROMPTS, CompletionRequest
from services.worker.engine.sampler import SampleRow, sample
from shared.errors import ContextTooLong, InvalidRequest
from shared.importance import METRICS
from shared.messages.requests import CacheHints, Importance

FACTS = ModelFacts(name="m", fingerprint="00", vocab_size=100, max_context=64)


def completion(**fields: Any) -> CompletionRequest:
    return msgspec.convert({"prompt": "hi", **fields}, CompletionRequest)


def chat(**fields: Any) -> ChatRequest:
    return msgspec.convert({"messages": [{"role": "user", "content": "hi"}], **fields}, ChatRequest)


def params(request: CompletionRequest | ChatRequest, facts: ModelFacts = FACTS) -> Any:
    return admission.sampling_params(request, facts, max_tokens=10, logprobs=None, prompt_logprobs=None)


def test_a_request_without_parameters_means_openais_defaults() -> None:
    """Temperature 1 and nothing else."""
    told = params(completion())

    assert (told.temperature, told.top_p, told.top_k, told.min_p, told.repetition_penalty) == (1.0, 1.0, 0, 0.0, 1.0)
    assert (told.stop, told.stop_token_ids, told.logit_bias, told.skip_special_tokens) == ((), (), {}, True)


def test_the_models_own_defaults_apply_where_the_caller_is_silent() -> None:
    """generation_config.json wins over OpenAI's defaults, and the caller over both."""
    defaults = SamplingDefaults(temperature=0.6, top_k=20)
    facts = ModelFacts(name="m", fingerprint="00", vocab_size=100, max_context=64, defaults=defaults)

    assert (params(completion(), facts).temperature, params(completion(), facts).top_k) == (0.6, 20)
    assert (params(completion(temperature=0, top_k=-1), facts).temperature) == 0
    assert (params(completion(temperature=0, top_k=-1), facts).top_k) == 0


def test_tokens_that_the_model_suppresses_are_never_drawn() -> None:
    """Whatever the caller asks for; its other biases stay."""
    facts = ModelFacts(
        name="m", fingerprint="00", vocab_size=100, max_context=64, defaults=SamplingDefaults(suppressed=(3, 5))
    )
    told = params(completion(logit_bias={"3": 100, "4": 1}, temperature=0), facts)
    drawn = sample(torch.eye(8)[3:4] * 50, [SampleRow(told, 0)])

    assert told.logit_bias == {3: admission.NEVER, 4: 1.0, 5: admission.NEVER}
    assert drawn[0].token == 4


def test_logprobs_of_the_prompt_read_no_cache() -> None:
    """Its logits must all be computed; otherwise the caller decides."""
    request = completion(cache={"write": False})
    scored = admission.sampling_params(request, FACTS, max_tokens=10, logprobs=None, prompt_logprobs=0)

    assert admission.cache_hints(request, scored) == CacheHints(read=False, write=False)
    assert admission.cache_hints(request, params(request)) == CacheHints(read=True, write=False)
    assert admission.cache_hints(completion(), params(completion())) == CacheHints()


def test_importance_is_passed_on() -> None:
    """Beside what the caller says of reading and writing."""
    request = completion(cache={"write": False})
    hints = admission.cache_hints(request, params(request), Importance(ratio=0.5))

    assert hints == CacheHints(write=False, importance=Importance(ratio=0.5))


def test_top_k_of_the_whole_vocabulary_is_off() -> None:
    """A number at or above the vocabulary chooses nothing."""
    assert params(completion(top_k=100)).top_k == 0
    assert params(completion(top_k=99)).top_k == 99


def test_a_stop_may_be_one_string_or_several() -> None:
    """Both become a tuple."""
    assert params(completion(stop="a")).stop == ("a",)
    assert params(completion(stop=["a", "b"])).stop == ("a", "b")


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (completion(min_tokens=11), "min_tokens"),
        (completion(stop_token_ids=[100]), "stop_token_ids"),
        (completion(stop_token_ids=[-1]), "stop_token_ids"),
        (completion(logit_bias={"100": 1}), "logit_bias.100"),
        (completion(logit_bias={"-1": 1}), "logit_bias.-1"),
        (completion(logit_bias={"1.5": 1}), "logit_bias.1.5"),
        (completion(logit_bias={"²": 1}), "logit_bias.²"),
        (completion(logit_bias={"": 1}), "logit_bias."),
        (completion(logit_bias={"9" * 40: 1}), "logit_bias." + "9" * 32),
    ],
)
def test_parameters_outside_the_model_are_refused(request_: CompletionRequest, param: str) -> None:
    """The error names the field."""
    with pytest.raises(InvalidRequest) as refusal:
        params(request_)

    assert refusal.value.param == param


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (completion(suffix="x"), "suffix"),
        (completion(best_of=2), "best_of"),
        (completion(n=2, best_of=3), "best_of"),
        (completion(max_tokens=0), "max_tokens"),
        (completion(stream_options={"include_usage": True}), "stream_options"),
        (completion(use_beam_search=True), "use_beam_search"),
        (completion(guided_whitespace_pattern=" "), "guided_whitespace_pattern"),
        (completion(cache={"ratio": 0.5}), "cache.ratio"),
        (completion(cache={"fidelity": "exact", "ratio": 0.5}), "cache.ratio"),
        (completion(cache={"metric": "h2o"}), "cache.metric"),
        (completion(cache={"first_tokens": 0}), "cache.first_tokens"),
        (completion(cache={"recent_tokens": 4}), "cache.recent_tokens"),
        (completion(cache={"fidelity": "importance", "read": False}), "cache.read"),
        (completion(cache={"fidelity": "importance", "metric": "l2"}), "cache.metric"),
    ],
)
def test_completions_refuse_what_is_not_served(request_: CompletionRequest, param: str) -> None:
    """A parameter that would change the answer is refused, never ignored."""
    with pytest.raises(InvalidRequest) as refusal:
        admission.check_completion(request_)

    assert refusal.value.param == param


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (chat(top_logprobs=2), "top_logprobs"),
        (chat(functions=[]), "functions"),
        (chat(modalities=["text", "audio"]), "modalities"),
        (chat(audio={"voice": "x"}), "audio"),
        (chat(moderation={"model": "x"}), "moderation"),
        (chat(web_search_options={}), "web_search_options"),
        (chat(continue_final_message=True), "continue_final_message"),
    ],
)
def test_chat_refuses_what_is_not_served(request_: ChatRequest, param: str) -> None:
    """A parameter that would change the answer is refused, never ignored."""
    with pytest.raises(InvalidRequest) as refusal:
        admission.check_chat(request_)

    assert refusal.value.param == param


def test_an_unknown_metric_is_answered_with_the_known_ones() -> None:
    """So that a caller need not look for them; what was sent comes back cut short."""
    with pytest.raises(InvalidRequest) as refusal:
        admission.check_chat(chat(cache={"fidelity": "importance", "metric": "x" * 10_000}))

    assert all(name in refusal.value.message for name in METRICS)
    assert len(refusal.value.message) < 200


def test_consistent_cache_options_pass() -> None:
    """All of them, for both endpoints."""
    for name in METRICS:
        whole = {"fidelity": "importance", "ratio": 0.25, "metric": name, "first_tokens": 4, "recent_tokens": 8}
        admission.check_chat(chat(cache=whole))
        admission.check_completion(completion(cache={**whole, "write": False}))
    admission.check_completion(completion(cache={"fidelity": "exact", "read": False}))


def test_harmless_values_of_unserved_parameters_pass() -> None:
    """Clients send defaults; those mean nothing."""
    admission.check_completion(completion(suffix="", best_of=1, use_beam_search=False, max_tokens=0, echo=True))
    admission.check_chat(chat(response_format={"type": "text"}, modalities=["text"], stream_options=None))
    admission.check_chat(chat(messages=[{"role": "assistant", "content": "x"}], continue_final_message=True))


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_the_four_kinds_of_prompt(prompt: Any, prompts: list[Any]) -> None:
    """A string, strings, token ids, lists of token ids."""
    assert admission.split_prompts(completion(prompt=prompt), 512) == prompts


@pytest.mark.parametrize("prompt", ["", ["a", ""], [[]], [[1], []], ["a", 1], [1, [2]], ["a"] * (MAX_PROMPTS + 1)])
def test_empty_mixed_and_too_many_prompts_are_refused(prompt: Any) -> None:
    """Each with an InvalidRequest about the prompt."""
    with pytest.raises(InvalidRequest) as refusal:
        admission.split_prompts(completion(prompt=prompt), 512)

    assert (refusal.value.param or "").startswith("prompt")


@pytest.mark.parametrize("tokens", [[], [-1], [100], [0, 10**30]])
def test_token_ids_must_exist(tokens: list[int]) -> None:
    """Empty lists and ids outside the vocabulary are refused."""
    with pytest.raises(InvalidRequest):
        admission.check_prompt_tokens(tokens, 100)


def test_room_for_the_answer() -> None:
    """What was asked, or the default, or the rest of the context."""
    assert admission.output_room(10, 5, None, ContextLimit(64)) == 5
    assert admission.output_room(10, None, None, ContextLimit(64)) == 54
    assert admission.output_room(10, None, 16, ContextLimit(64)) == 16
    assert admission.output_room(60, None, 16, ContextLimit(64)) == 4


@pytest.mark.parametrize(("prompt_tokens", "asked"), [(64, None), (65, 1), (60, 5), (10, 10**30)])
def test_an_answer_without_room_is_refused_with_both_numbers(prompt_tokens: int, asked: int | None) -> None:
    """context_length_exceeded names the context and the prompt."""
    with pytest.raises(ContextTooLong) as refusal:
        admission.output_room(prompt_tokens, asked, None, ContextLimit(64))

    assert "64" in refusal.value.message
    assert str(prompt_tokens) in refusal.value.message
    assert refusal.value.code == "context_length_exceeded"


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    """No token is longer than the longest one."""
    admission.check_prompt_characters(2 * 10 * 64, 10, 64)
    with pytest.raises(ContextTooLong):
        admission.check_prompt_characters(2 * 10 * 64 + 1, 10, 64)


def test_seeds_of_choices_differ_and_are_reproducible() -> None:
    """The first choice has the caller's seed; the others follow from it."""
    seeds = [admission.derive_seed(42, choice) for choice in range(128)]

    assert seeds[0] == 42
    assert len(set(seeds)) == 128
    assert seeds == [admission.derive_seed(42, choice) for choice in range(128)]
    assert all(0 <= seed < 2**63 for seed in (*seeds, admission.derive_seed(-1, 0)))
