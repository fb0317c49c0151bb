"""What the measuring client reads of a stream."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from thermocline.client import Answer, RequestError, stream_answer
from thermocline.client.stream import SOURCES

IMPORTANCE = {
    "ratio": 0.25, "metric": "last_pooled", "loaded_tokens": 16, "prefix_tokens": 64, "layers": 6,
    "layers_fallen_back": 1, "disk_bytes": 4096,
}  # fmt: skip


async def answer_of(*events: dict[str, Any]) -> Answer:
    """The answer that a server gives with these events."""
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=body))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        return await stream_answer(client, "/v1/completions", {"prompt": "hi"})


def usage(details: dict[str, int], **more: Any) -> dict[str, Any]:
    tokens = {"prompt_tokens": 100, "completion_tokens": 1, "prompt_tokens_details": details}
    return {"choices": [], "usage": {**tokens, **more}}


ENDED = {"choices": [{"text": "yes", "finish_reason": "length"}]}


async def test_a_lossy_answer_says_so() -> None:
    """How much of its prefix was loaded, and that most of it came in that way."""
    details = {"cached_tokens": 80, "device_tokens": 16, "sparse_tokens": 64}

    answer = await answer_of(ENDED, usage(details, importance=IMPORTANCE))

    assert (answer.text, answer.cached_tokens, answer.sparse_tokens) == ("yes", 80, 64)
    assert (answer.source, answer.importance) == ("sparse", IMPORTANCE)


@pytest.mark.parametrize("more", [{"importance": None}, {}])
async def test_an_exact_answer_has_no_importance(more: dict[str, None]) -> None:
    """Null here, absent from other servers."""
    answer = await answer_of(ENDED, usage({"cached_tokens": 16, "host_tokens": 16}, **more))

    assert (answer.importance, answer.sparse_tokens, answer.source) == (None, 0, "host")


async def test_every_source_is_read() -> None:
    """By the name of the API's field."""
    details = {f"{source}_tokens": number for number, source in enumerate(SOURCES, 1)}

    answer = await answer_of(ENDED, usage({**details, "cached_tokens": 28}))

    assert [getattr(answer, f"{source}_tokens") for source in SOURCES] == list(range(1, len(SOURCES) + 1))


async def test_a_stream_that_breaks_off_is_an_error() -> None:
    """An answer without its end is none."""
    with pytest.raises(RequestError, match="ended before"):
        await answer_of({"choices": [{"text": "ye"}]})


async def test_margins_and_the_prompt_are_read_where_they_were_asked_for() -> None:
    """The distance between the two likeliest tokens, by token; none without logprobs."""
    tops = [[{"logprob": -0.1}, {"logprob": -2.6}], [{"logprob": -0.5}, {"logprob": -0.75}]]
    content = [{"token": "x", "top_logprobs": top} for top in tops]

    answer = await answer_of(
        {"choices": [{"delta": {"content": "xx"}, "logprobs": {"content": content}}], "prompt_token_ids": [7, 8]}, ENDED
    )

    assert (answer.margins, answer.prompt_token_ids) == ([2.5, 0.25], [7, 8])
    assert (await answer_of(ENDED)).margins == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ({"code": "queue_full", "type": "server_error"}, "queue_full"),
        ({"code": None, "type": "server_error"}, "server_error"),
    ],
)
async def test_a_refusal_is_named_by_its_code_or_else_by_its_type(error: dict[str, Any], code: str) -> None:
    """OpenAI's errors may have no code."""
    body = {"error": error | {"message": "no"}}
    transport = httpx.MockTransport(lambda request: httpx.Response(503, json=body))

    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        with pytest.raises(RequestError) as refused:
            await stream_answer(client, "/v1/completions", {"prompt": "hi"})

    assert refused.value.code == code
