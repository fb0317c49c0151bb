"""The official OpenAI client against a real server."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest

from shared.messages.base import unpack_int32
from shared.messages.requests import Importance
from shared.messages.tokens import ImportanceUsage, Usage
from tests.unit.gateway.running_gateway import Harness, running_gateway, says, tokenizer

TEXT = "the quick brown fox jumps over the lazy dog"
TOKENS = tokenizer().encode_now(TEXT, add_special_tokens=False)


def client_of(harness: Harness) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{harness.base_url}/v1", api_key="none", max_retries=0)


async def test_a_chat_completion() -> None:
    """Content, finish reason, usage with cached tokens, and extension fields."""
    async with running_gateway(says(TEXT), over_http=True) as harness, client_of(harness) as client:
        answer = await client.chat.completions.create(
            model="test-model",
            messages=[
                {"role": "system", "content": "x"},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            ],
            logprobs=True,
            top_logprobs=2,
            extra_body={"return_token_ids": True, "timing": True},
        )

    choice, usage = answer.choices[0], answer.usage
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", TEXT, "stop")
    assert choice.logprobs is not None
    assert [entry.token for entry in choice.logprobs.content or []] == [tokenizer().decode([t]) for t in TOKENS]
    assert choice.model_extra is not None
    assert choice.model_extra["token_ids"] == TOKENS
    assert answer.model_extra is not None
    assert answer.model_extra["timing"]["first_token_ms"] == 15
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.completion_tokens == len(TOKENS)
    prompt = usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens == prompt // 2 + prompt // 4


async def test_a_streamed_chat_completion() -> None:
    """The role first, content in pieces, the reason, then usage without choices."""
    async with running_gateway(says(TEXT), over_http=True) as harness, client_of(harness) as client:
        harness.cell.pace_s = 0.002
        stream = await client.chat.completions.create(
            model="test-model",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
            n=2,
        )
        chunks = [chunk async for chunk in stream]

    first = [chunk.choices[0] for chunk in chunks[:2]]
    assert [(choice.index, choice.delta.role, choice.delta.content) for choice in first] == [
        (0, "assistant", ""),
        (1, "assistant", ""),
    ]
    for index in (0, 1):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in mine) == TEXT
        assert [choice.finish_reason for choice in mine if choice.finish_reason] == ["stop"]
    assert len(chunks) > 5
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2 * len(TOKENS)
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_continuous_usage_is_in_every_chunk() -> None:
    """Growing, as the extension of vLLM has it."""
    async with running_gateway(says(TEXT), over_http=True) as harness, client_of(harness) as client:
        harness.cell.pace_s = 0.002
        options: Any = {"include_usage": True, "continuous_usage_stats": True}  # An extension of vLLM.
        stream = await client.completions.create(
            model="test-model",
            prompt="hi",
            stream=True,
            stream_options=options,
        )
        counts = [chunk.usage.completion_tokens async for chunk in stream if chunk.usage is not None]

    assert counts == sorted(counts)
    assert counts[-1] == min(16, len(TOKENS))


async def test_a_completion_of_several_prompts_and_choices() -> None:
    """All choices of the first prompt come first; echo repeats each prompt; usage counts prompts once."""
    async with running_gateway(says(TEXT), over_http=True) as harness, client_of(harness) as client:
        answer = await client.completions.create(
            model="test-model", prompt=["a b", "c"], n=2, echo=True, max_tokens=3, seed=7
        )
        submitted = harness.cell.submitted

    expected = tokenizer().decode(TOKENS[:3])
    assert [choice.text for choice in answer.choices] == ["a b" + expected] * 2 + ["c" + expected] * 2
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 4
    assert len({request.sampling.seed for request in submitted}) == 2
    assert {request.sampling.seed for request in submitted if request.request_id[-1] in "02"} == {7}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(
        len(tokenizer().encode_now(p, add_special_tokens=True)) for p in ("a b", "c")
    )


async def test_token_id_prompts_reach_the_worker_as_they_are() -> None:
    """One list, or several."""
    async with running_gateway(says(TEXT), over_http=True) as harness, client_of(harness) as client:
        await client.completions.create(model="test-model", prompt=[5, 6, 7])
        await client.completions.create(model="test-model", prompt=[[8], [9, 10]])
        prompts = [unpack_int32(request.prompt) for request in harness.cell.submitted]

    assert prompts == [[5, 6, 7], [8], [9, 10]]


async def test_scoring_a_prompt_as_evaluation_tools_do() -> None:
    """echo, logprobs and max_tokens 0: logprobs of the prompt's tokens, and no output."""
    async with running_gateway(says(TEXT), over_http=True) as harness, client_of(harness) as client:
        answer = await client.completions.create(
            model="test-model", prompt=[5, 6, 7], echo=True, logprobs=1, max_tokens=0
        )
        told = harness.cell.submitted[0].sampling

    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == [None, -2.0, -2.0]
    assert answer.choices[0].finish_reason == "length"
    assert (told.max_tokens, told.prompt_logprobs) == (1, 1)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


@pytest.mark.parametrize(("logprobs", "prompt_logprobs"), [(1, 0), (0, 1), (None, 0)])
async def test_an_echo_has_as_many_logprobs_as_its_answer(logprobs: int | None, prompt_logprobs: int) -> None:
    """Whatever prompt_logprobs asks for beside, which has its own number."""
    async with running_gateway(says(TEXT), over_http=True) as harness, client_of(harness) as client:
        answer = await client.completions.create(
            model="test-model",
            prompt=[5, 6, 7],
            echo=True,
            logprobs=logprobs,
            max_tokens=1,
            extra_body={"prompt_logprobs": prompt_logprobs},
        )
        told = harness.cell.submitted[0].sampling

    assert (told.logprobs, told.prompt_logprobs) == (logprobs, max(prompt_logprobs, logprobs or 0))
    (choice,) = answer.choices
    ranks = [{token: each["rank"] for token, each in (entry or {}).items()} for entry in choice.prompt_logprobs]  # type: ignore[attr-defined]
    assert ranks == [{}, *({str(token): 1 if prompt_logprobs else None} for token in (6, 7))]
    if logprobs is not None:
        assert choice.logprobs is not None
        assert [len(entry or {}) for entry in choice.logprobs.top_logprobs or []] == [0, 1, 1, 1]


@pytest.mark.parametrize("is_text", [False, True])
async def test_offsets_are_places_in_an_echo(is_text: bool) -> None:
    """An echo of token ids leaves special tokens out, and a text keeps them."""
    text = "a<|end|> the"
    asked = tokenizer().encode_now(text, add_special_tokens=False)
    async with running_gateway(says(TEXT), over_http=True) as harness, client_of(harness) as client:
        answer = await client.completions.create(
            model="test-model", prompt=text if is_text else asked, echo=True, logprobs=1, max_tokens=2
        )

    choice = answer.choices[0]
    assert choice.logprobs is not None
    tokens, offsets = choice.logprobs.tokens or [], choice.logprobs.text_offset or []
    assert tokens == [tokenizer().decode([token]) for token in [*asked, *TOKENS[:2]]]
    assert choice.text.startswith("a<|end|> the" if is_text else "a the")
    for token, place in zip(tokens, offsets, strict=True):
        assert choice.text[place:].startswith(token) == (is_text or token != "<|end|>")


async def test_a_streamed_completion_with_logprobs_and_offsets() -> None:
    """Offsets go on from chunk to chunk."""
    async with running_gateway(says(TEXT), over_http=True) as harness, client_of(harness) as client:
        harness.cell.pace_s = 0.002
        stream = await client.completions.create(model="test-model", prompt="hi", stream=True, logprobs=1)
        chunks = [chunk async for chunk in stream]

    offsets = [
        offset
        for chunk in chunks
        for choice in chunk.choices
        for offset in (choice.logprobs.text_offset or [])  # type: ignore[union-attr]
    ]
    texts = [tokenizer().decode([token]) for token in TOKENS[:16]]
    assert offsets == [sum(len(text) for text in texts[:place]) for place in range(len(texts))]


async def test_sampling_parameters_reach_the_worker() -> None:
    """Standard ones and extensions."""
    async with running_gateway(says(TEXT), over_http=True) as harness, client_of(harness) as client:
        await client.chat.completions.create(
            model="test-model",
            messages=[{"role": "user", "content": "hi"}],
            temperature=0.5,
            top_p=0.9,
            presence_penalty=0.1,
            frequency_penalty=-0.2,
            seed=11,
            stop=["x", "yy"],
            logit_bias={"5": -100},
            max_completion_tokens=9,
            extra_body={
                "top_k": 4, "min_p": 0.05, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True,
                "stop_token_ids": [3], "include_stop_str_in_output": True, "skip_special_tokens": False,
                "cache": {"read": False}, "priority": -3, "deadline_ms": 60_000, "cache_salt": "tenant",
            },
        )  # fmt: skip
        await client.chat.completions.create(model="test-model", messages=[{"role": "user", "content": "hi"}])
        request, plain = harness.cell.submitted

    told = request.sampling
    assert (told.temperature, told.top_p, told.seed, told.max_tokens, told.min_tokens) == (0.5, 0.9, 11, 9, 2)
    assert (told.presence_penalty, told.frequency_penalty, told.repetition_penalty) == (0.1, -0.2, 1.1)
    assert (told.top_k, told.min_p, told.ignore_eos, told.include_stop) == (4, 0.05, True, True)
    assert (told.stop, told.stop_token_ids, told.skip_special_tokens) == (("x", "yy"), (3,), False)
    assert {key: math.isclose(value, -100) for key, value in told.logit_bias.items()} == {5: True}
    assert (request.cache.read, request.cache.write, request.priority, request.deadline_ms) == (False, True, -3, 60_000)
    assert request.namespace != plain.namespace
    assert plain.sampling.max_tokens == 512 - plain.prompt_tokens


async def test_importance_is_asked_for_and_reported_through_the_client() -> None:
    """A field of extra_body, and what was loaded as a further field of usage, streaming or not; a refusal is typed."""
    loaded = ImportanceUsage(
        ratio=0.25, metric="last_pooled", loaded_tokens=2, layers=6, layers_fallen_back=0, disk_bytes=300
    )
    body = {"cache": {"fidelity": "importance", "ratio": 0.25}}
    async with running_gateway(says(TEXT), over_http=True, importance="on") as harness, client_of(harness) as client:
        harness.cell.usage = Usage(sparse_tokens=8, importance=loaded)
        whole = await client.chat.completions.create(
            model="test-model", messages=[{"role": "user", "content": "hi"}], extra_body=body
        )
        stream = await client.completions.create(
            model="test-model",
            prompt="hi",
            stream=True,
            stream_options={"include_usage": True},
            extra_body=body,
        )
        chunks = [chunk async for chunk in stream]
        with pytest.raises(openai.BadRequestError) as refusal:
            await client.completions.create(model="test-model", prompt="hi", extra_body={"cache": {"ratio": 0.25}})
        submitted = [request.cache.importance for request in harness.cell.submitted]

    assert submitted == [Importance(ratio=0.25)] * 2
    assert refusal.value.param == "cache.ratio"
    for usage in (whole.usage, chunks[-1].usage):
        assert usage is not None
        assert usage.model_extra is not None
        assert usage.model_extra["importance"]["loaded_tokens"] == 2
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.model_extra is not None
        assert usage.prompt_tokens_details.model_extra["sparse_tokens"] == 8


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("queue_full", openai.RateLimitError),
        ("context_length_exceeded", openai.BadRequestError),
        ("no_capacity", openai.InternalServerError),
        ("deadline_exceeded", openai.InternalServerError),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_of_the_scheduler_are_typed(code: str, kind: type[openai.APIStatusError], stream: bool) -> None:
    """With the status of their own, streaming or not, since no token was sent yet; and nothing is cancelled."""
    async with running_gateway(over_http=True) as harness, client_of(harness) as client:
        call = client.completions.create(model="test-model", prompt="hi", stream=stream)
        with pytest.raises(kind) as refusal:
            await _while(call, harness, code)
        assert harness.cell.cancelled == []

    assert refusal.value.message
    if code in ("queue_full", "no_capacity"):
        assert refusal.value.response.headers["retry-after"] == "3"


async def _while(call: object, harness: Harness, code: str) -> object:
    import asyncio

    task = asyncio.ensure_future(call)  # type: ignore[call-overload]
    await harness.cell.until(lambda: bool(harness.cell.submitted))
    await harness.cell.refuse(harness.cell.submitted[0], code, retry_after_ms=2500)
    return await task


async def test_models_are_listed_and_looked_up() -> None:
    """And an unknown one is a NotFoundError."""
    async with running_gateway(over_http=True) as harness, client_of(harness) as client:
        listed = await client.models.list()
        one = await client.models.retrieve("test-model")
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="gpt-4", messages=[{"role": "user", "content": "hi"}])

    assert [model.id for model in listed.data] == [one.id] == ["test-model"]
    assert missing.value.code == "model_not_found"
