"""The official Anthropic client against a real server."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import pytest

from shared.messages.tokens import Usage
from tests.unit.gateway.running_gateway import Harness, running_gateway, says, tokenizer

TEXT = "the quick brown fox jumps over the lazy dog"
TOKENS = tokenizer().encode_now(TEXT, add_special_tokens=False)
HELLO: list[Any] = [{"role": "user", "content": "hi"}]


def client_of(harness: Harness, key: str = "none") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=harness.base_url, api_key=key, max_retries=0)


async def test_a_message() -> None:
    """Content, stop reason, and a usage whose parts make up the prompt."""
    async with running_gateway(says(TEXT), over_http=True) as harness, client_of(harness) as client:
        harness.cell.usage = Usage(device_tokens=3, host_tokens=2)
        answer = await client.messages.create(
            model="test-model",
            max_tokens=100,
            system=[{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
            messages=HELLO,
        )
        counted = await client.messages.count_tokens(model="test-model", system="x", messages=HELLO)

    (block,) = answer.content
    assert (block.type, getattr(block, "text", "")) == ("text", TEXT)
    assert (answer.role, answer.stop_reason, answer.stop_sequence) == ("assistant", "end_turn", None)
    assert answer.model == "test-model"
    assert answer.id.startswith("msg")
    assert answer._request_id is not None
    assert answer._request_id.startswith("http")
    usage = answer.usage
    assert (usage.cache_read_input_tokens, usage.output_tokens) == (5, len(TOKENS))
    assert usage.cache_creation_input_tokens is not None
    assert usage.input_tokens + 5 + usage.cache_creation_input_tokens == counted.input_tokens


async def test_a_streamed_message() -> None:
    """Events come in the order that clients check, and put together they are the whole message."""
    async with running_gateway(says(TEXT), over_http=True) as harness, client_of(harness) as client:
        harness.cell.pace_s = 0.002
        raw = [
            event
            async for event in await client.messages.create(
                model="test-model", max_tokens=100, messages=HELLO, stream=True
            )
        ]
        async with client.messages.stream(model="test-model", max_tokens=100, messages=HELLO) as stream:
            texts = [text async for text in stream.text_stream]
            final = await stream.get_final_message()

    kinds = [event.type for event in raw]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert len(kinds) > 8
    start, delta = raw[0], raw[-2]
    assert start.type == "message_start"
    assert delta.type == "message_delta"
    assert (start.message.content, start.message.stop_reason) == ([], None)
    assert (delta.delta.stop_reason, delta.usage.output_tokens) == ("end_turn", len(TOKENS))
    assert "".join(texts) == TEXT
    assert (final.content[0].type, final.stop_reason) == ("text", "end_turn")
    assert final.usage.output_tokens == len(TOKENS)


@pytest.mark.parametrize(
    ("max_tokens", "reason"), [(3, "max_tokens"), (1_000, "model_context_window_exceeded"), (100, "end_turn")]
)
async def test_why_an_answer_ends(max_tokens: int, reason: str) -> None:
    """At its bound, at the context's where that is nearer, or by itself."""
    script = (lambda request: [(5, "a")] * request.sampling.max_tokens) if reason != "end_turn" else says(TEXT)
    async with running_gateway(script, over_http=True) as harness, client_of(harness) as client:
        answer = await client.messages.create(model="test-model", max_tokens=max_tokens, messages=HELLO)

    assert answer.stop_reason == reason


async def test_a_stop_sequence_is_named() -> None:
    """With the sequence that was met."""
    async with running_gateway(over_http=True) as harness, client_of(harness) as client:
        asking = asyncio.create_task(
            client.messages.create(model="test-model", max_tokens=9, messages=HELLO, stop_sequences=["END"])
        )
        await harness.cell.until(lambda: bool(harness.cell.submitted))
        request = harness.cell.submitted[0]
        await harness.cell.emit(request, [(5, "a")], finish="stop", stop_match="END")
        answer = await asking

    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "END")
    assert request.sampling.stop == ("END",)


async def test_errors_have_anthropics_shape() -> None:
    """And the client raises what it raises for Anthropic's."""
    async with running_gateway(says(TEXT), over_http=True, api_keys=("secret",)) as harness:
        async with client_of(harness, "wrong") as client:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await client.messages.create(model="test-model", max_tokens=9, messages=HELLO)
        async with client_of(harness, "secret") as client:
            await client.messages.create(model="test-model", max_tokens=9, messages=HELLO)
            with pytest.raises(anthropic.NotFoundError) as unknown:
                await client.messages.create(model="other", max_tokens=9, messages=HELLO)
            pictured: Any = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]
            with pytest.raises(anthropic.BadRequestError, match="image") as image:
                await client.messages.create(model="test-model", max_tokens=9, messages=pictured)

    assert refused.value.body is not None
    for error, kind in (
        (refused, "authentication_error"),
        (unknown, "not_found_error"),
        (image, "invalid_request_error"),
    ):
        body: Any = error.value.body
        assert body["type"] == "error"
        assert body["error"]["type"] == kind
        assert body["request_id"] == error.value.request_id


async def test_a_full_cell_is_overloaded() -> None:
    """With the status that clients try again for."""
    async with running_gateway(over_http=True) as harness, client_of(harness) as client:
        asking = asyncio.create_task(client.messages.create(model="test-model", max_tokens=9, messages=HELLO))
        await harness.cell.until(lambda: bool(harness.cell.submitted))
        await harness.cell.refuse(harness.cell.submitted[0], "queue_full", retry_after_ms=2000)
        with pytest.raises(anthropic.APIStatusError) as refused:
            await asking

    assert refused.value.status_code == 529
    assert refused.value.response.headers["retry-after"] == "2"


async def test_a_stream_that_breaks_ends_with_an_error() -> None:
    """An event in Anthropic's shape, behind what was said."""
    async with running_gateway(over_http=True) as harness, client_of(harness) as client:
        stream = asyncio.create_task(
            client.messages.create(model="test-model", max_tokens=9, messages=HELLO, stream=True)
        )
        await harness.cell.until(lambda: bool(harness.cell.submitted))
        request = harness.cell.submitted[0]
        await harness.cell.emit(request, [(5, "a")])
        events = await stream
        heard: list[str] = []
        with pytest.raises(anthropic.APIStatusError, match="broken"):  # noqa: PT012
            async for event in events:
                heard.append(event.type)
                if len(heard) == 3:
                    await harness.cell.emit(request, [(6, "")], index=1, finish="error", error="broken")

    assert heard == ["message_start", "content_block_start", "content_block_delta"]
