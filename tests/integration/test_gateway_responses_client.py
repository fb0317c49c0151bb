"""The official OpenAI client's Responses API against a real server."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from shared.bus.protocol import StreamLimits
from shared.messages.base import unpack_int32
from shared.messages.tokens import Usage
from tests.unit.gateway.running_gateway import Harness, running_gateway, says, tokenizer

TEXT = "the quick brown fox jumps over the lazy dog"
TOKENS = tokenizer().encode_now(TEXT, add_special_tokens=False)


def client_of(harness: Harness, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{harness.base_url}/v1", api_key=key, max_retries=0)


def prompt_text(harness: Harness, number: int) -> str:
    """The prompt of one of the requests that the cell was given."""
    return tokenizer().decode(list(unpack_int32(harness.cell.submitted[number].prompt)))


async def test_a_response() -> None:
    """Text, status, what was asked, and a usage that adds up."""
    async with running_gateway(says(TEXT), over_http=True) as harness, client_of(harness) as client:
        harness.cell.usage = Usage(device_tokens=3, host_tokens=2)
        answer = await client.responses.create(
            model="test-model", instructions="x", input="hi", metadata={"a": "b"}, temperature=0.5, top_logprobs=2
        )
        counted = await client.responses.input_tokens.count(model="test-model", instructions="x", input="hi")

    assert (answer.output_text, answer.status, answer.instructions) == (TEXT, "completed", "x")
    assert (answer.metadata, answer.temperature, answer.tools) == ({"a": "b"}, 0.5, [])
    (item,) = answer.output
    assert item.type == "message"
    part = item.content[0]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert [entry.token for entry in part.logprobs] == [tokenizer().decode([token]) for token in TOKENS]
    usage = answer.usage
    assert usage is not None
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens) == (counted.input_tokens, 5)
    assert (usage.output_tokens, usage.total_tokens) == (len(TOKENS), counted.input_tokens + len(TOKENS))


async def test_a_streamed_response() -> None:
    """Events in OpenAI's order, numbered without a gap, and the last holds the whole response."""
    async with running_gateway(says(TEXT), over_http=True) as harness, client_of(harness) as client:
        harness.cell.pace_s = 0.002
        stream = await client.responses.create(model="test-model", input="hi", stream=True, top_logprobs=1)
        events = [event async for event in stream]
        async with client.responses.stream(model="test-model", input="hi") as helped:
            await helped.until_done()
            final = await helped.get_final_response()

    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == TEXT
    assert sum(len(event.logprobs) for event in deltas) == len(TOKENS)
    completed = events[-1]
    assert completed.type == "response.completed"
    assert (completed.response.output_text, completed.response.status) == (TEXT, "completed")
    assert final.output_text == TEXT


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "hi", "stop": ["END"]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "stop_sequences": ["END"]}),
    ],
)
async def test_sampling_parameters_of_a_chat_reach_the_worker(path: str, body: dict[str, Any]) -> None:
    """Over both of the newer APIs."""
    fields = {"repetition_penalty": 1.5, "logit_bias": {"5": 1.0}, "structured_outputs": {"regex": "a+"}, "min_p": 0.1}
    async with running_gateway(says(TEXT)) as harness:
        answer = await harness.client.post(path, json={"model": "test-model", **body, **fields})
        told = harness.cell.submitted[0].sampling

    assert answer.status_code == 200
    assert (told.stop, told.repetition_penalty, told.logit_bias, told.min_p) == (("END",), 1.5, {5: 1.0}, 0.1)
    assert told.grammar is not None


async def test_an_answer_at_its_bound_is_incomplete() -> None:
    """Whole and streamed, with the reason."""
    async with running_gateway(says(TEXT), over_http=True) as harness, client_of(harness) as client:
        whole = await client.responses.create(model="test-model", input="hi", max_output_tokens=3)
        stream = await client.responses.create(model="test-model", input="hi", max_output_tokens=3, stream=True)
        last = [event async for event in stream][-1]

    assert last.type == "response.incomplete"
    for response in (whole, last.response):
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.output[0].type == "message"
        assert response.output[0].status == "incomplete"


async def test_a_conversation_goes_on_from_what_is_kept() -> None:
    """The model gets all turns, and each response can be looked up, listed and erased."""
    async with running_gateway(says(TEXT), over_http=True) as harness, client_of(harness) as client:
        first = await client.responses.create(model="test-model", input="one", instructions="be short")
        second = await client.responses.create(model="test-model", input="two", previous_response_id=first.id)
        by_hand = await client.responses.create(
            model="test-model",
            input=[
                {"role": "user", "content": "one"},
                *[item.model_dump(exclude_none=True) for item in first.output],  # type: ignore[list-item]
                {"role": "user", "content": [{"type": "input_text", "text": "two"}]},
            ],
            store=False,
        )
        kept = await client.responses.retrieve(second.id)
        items = await client.responses.input_items.list(second.id, order="asc")
        page = await client.responses.input_items.list(second.id, limit=2)
        rest = await client.responses.input_items.list(second.id, limit=2, after=page.data[-1].id)
        await client.responses.delete(first.id)
        third = await client.responses.create(model="test-model", input="three", previous_response_id=second.id)
        for gone in (first.id, by_hand.id, "resp_1", "resp_" + "0" * 32, "é"):
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(gone)
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.responses.create(model="test-model", input="three", previous_response_id=first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete(first.id)
        with pytest.raises(openai.BadRequestError):
            await client.responses.cancel(second.id)

    assert prompt_text(harness, 1) == prompt_text(harness, 2)
    assert kept == second
    assert [item.type for item in items.data] == ["message"] * 3
    assert [item.id for item in [*page.data, *rest.data]] == [item.id for item in reversed(items.data)]
    assert (by_hand.store if hasattr(by_hand, "store") else None) is False
    assert third.previous_response_id == second.id
    assert unknown.value.code == "previous_response_not_found"
    assert unknown.value.param == "previous_response_id"


async def test_another_tenants_response_is_not_there() -> None:
    """Nor one of another salt; and its own caller finds it."""
    keys = ("one", "two")
    async with running_gateway(says(TEXT), over_http=True, api_keys=keys) as harness:
        async with client_of(harness, "one") as client:
            answer = await client.responses.create(model="test-model", input="hi")
            salted = await client.responses.create(model="test-model", input="hi", extra_body={"cache_salt": "s"})
            with pytest.raises(openai.NotFoundError):
                await client.responses.retrieve(salted.id)
            with pytest.raises(openai.NotFoundError):
                await client.responses.create(model="test-model", input="on", previous_response_id=salted.id)
            found = await client.responses.retrieve(salted.id, extra_query={"cache_salt": "s"})
        async with client_of(harness, "two") as stranger:
            for call in (
                stranger.responses.retrieve(answer.id),
                stranger.responses.delete(answer.id),
                stranger.responses.input_items.list(answer.id),
                stranger.responses.create(model="test-model", input="on", previous_response_id=answer.id),
            ):
                with pytest.raises(openai.NotFoundError):
                    await call
        async with client_of(harness, "one") as client:
            again = await client.responses.retrieve(answer.id)

    assert (found, again) == (salted, answer)


async def test_what_cannot_be_kept_says_so() -> None:
    """One too large for the broker, and one of a gateway that keeps none."""
    many = {f"k{number}": "v" * 512 for number in range(16)}
    async with running_gateway(says(TEXT), over_http=True, max_payload=8192) as harness, client_of(harness) as client:
        small = await client.responses.create(model="test-model", input="hi")
        large = await client.responses.create(model="test-model", input="hi", metadata=many)
    forgetful = {"over_http": True, "keep_responses": False}
    async with running_gateway(says(TEXT), **forgetful) as harness, client_of(harness) as client:  # type: ignore[arg-type]
        unkept = await client.responses.create(model="test-model", input="hi", store=True)

    assert [answer.to_dict()["store"] for answer in (small, large, unkept)] == [True, False, False]


async def test_a_stream_that_breaks_fails() -> None:
    """With the response as far as it went."""
    async with running_gateway(over_http=True) as harness, client_of(harness) as client:
        asking = asyncio.create_task(client.responses.create(model="test-model", input="hi", stream=True))
        await harness.cell.until(lambda: bool(harness.cell.submitted))
        request = harness.cell.submitted[0]
        await harness.cell.emit(request, [(5, "a")])
        stream = await asking
        events = []
        async for event in stream:
            events.append(event)
            if event.type == "response.output_text.delta":
                await harness.cell.emit(request, [(6, "")], index=1, finish="error", error="broken")

    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error is not None
    assert (last.response.error.code, last.response.error.message) == ("server_error", "broken")
    assert last.response.output_text == "a"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("background", True),
        ("conversation", "conv_1"),
        ("prompt", {"id": "p"}),
        ("truncation", "auto"),
        ("tools", [{"type": "web_search"}]),
        ("tools", [{"type": "custom", "name": "x"}]),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]),
        ("input", []),
        ("input", None),
        ("context_management", [{"type": "compaction"}]),
    ],
)
async def test_what_is_not_served_is_refused_by_name(field: str, value: object) -> None:
    """Rather than answered differently from what was asked."""
    async with running_gateway(says(TEXT)) as harness:
        body = {"model": "test-model", "input": "hi", field: value}
        answer = await harness.client.post("/v1/responses", json=body)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(field)
    assert not harness.cell.submitted


async def test_input_may_refer_to_items_of_earlier_responses() -> None:
    """As Vercel's AI SDK does: each turn sends the user's texts again, and names what was answered."""
    async with running_gateway(says(TEXT)) as harness:
        sent: list[dict[str, object]] = []
        for _ in range(3):
            sent.append({"role": "user", "content": "go on"})
            answer = await harness.client.post("/v1/responses", json={"model": "test-model", "input": sent})
            sent.append({"type": "item_reference", "id": answer.json()["output"][0]["id"]})
        whole = [
            {"role": "user", "content": "go on"} if "role" in item else {"role": "assistant", "content": TEXT}
            for item in sent[:-1]
        ]
        await harness.client.post("/v1/responses", json={"model": "test-model", "input": whole})
        unknown = await harness.client.post(
            "/v1/responses", json={"model": "test-model", "input": [sent[0], {"type": "item_reference", "id": "x"}]}
        )

    *_, referring, repeating = harness.cell.submitted
    assert referring.prompt == repeating.prompt
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "item_not_found")
    assert unknown.json()["error"]["param"] == "input[1].id"


async def test_compaction_is_refused_with_the_reason() -> None:
    """Rather than taken for a response of that name."""
    async with running_gateway(over_http=True) as harness, client_of(harness) as client:
        with pytest.raises(openai.BadRequestError, match="as it is sent") as refused:
            await client.responses.compact(model="test-model", input="hi")

    assert refused.value.code == "unsupported_endpoint"


async def test_embeddings_are_refused_with_the_reason() -> None:
    """As what a caller did wrong, so that no client tries again."""
    async with running_gateway(over_http=True) as harness, client_of(harness) as client:
        with pytest.raises(openai.BadRequestError, match="trained to continue") as refused:
            await client.embeddings.create(model="test-model", input="hi")

    assert refused.value.code == "unsupported_endpoint"


def test_bounds_of_what_is_kept_have_defaults() -> None:
    """A day, 256 MiB and 100,000 responses."""
    limits = StreamLimits()

    assert (limits.kept_age_s, limits.kept_bytes, limits.kept_entries) == (86_400, 256 * 2**20, 100_000)
