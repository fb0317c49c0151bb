"""Forced tool calls in a live cell: a model that knows nothing of tools makes valid ones, and its next turn hits."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.cell import Cell, running_cell
from tests.checkpoints import make_checkpoint
from tests.nats_server import NatsServer
from tests.unit.gateway.replies import families

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

PAGE_SIZE = 16
SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": True}} for name in ("look", "wait")
]
ASK: Any = [{"role": "user", "content": "How is it in Rome?"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["hermes", "qwen3_coder", "mistral"])
async def cell(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cell]:
    """A cell with a random model and a template of this family, whose markers are special tokens."""
    template = {
        "hermes": families.HERMES,
        "qwen3_coder": families.QWEN3_CODER,
        "mistral": families.MISTRAL,
    }[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    model = make_checkpoint("llama", folder / "llama")
    families.byte_tokenizer(model, template, families.SPECIALS)
    with NatsServer(folder / "nats") as server:
        async with running_cell(server.url, model, worker_settings={"page_size": PAGE_SIZE}) as running:
            yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(cell: Cell) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client."""
    async with openai.AsyncOpenAI(base_url=f"{cell.base_url}/v1", api_key="none", max_retries=0) as made:
        yield made


def check_call(call: Any) -> None:
    """The call is one of a tool that there is, with arguments that are valid under its schema."""
    arguments = json.loads(call.function.arguments)
    assert call.function.name in ("look", "wait")
    assert sorted(arguments) == ["days", "place"]
    assert arguments["place"] in ("Paris", "Rome")
    assert 0 <= arguments["days"] <= 99


async def test_forced_calls_are_valid_and_the_next_turn_finds_all_of_them(
    cell: Cell, client: openai.AsyncOpenAI
) -> None:
    """Every full page of the first turn, prompt and answer, but for the token that ended it."""
    first = await client.chat.completions.create(
        model=cell.model, messages=ASK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=5,
        max_tokens=400,
    )  # fmt: skip
    await cell.settle()
    message, usage = first.choices[0].message, first.usage
    (call,) = message.tool_calls or []
    said: Any = message.model_dump(exclude_none=True)
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    second = await client.chat.completions.create(
        model=cell.model, messages=[*ASK, said, result], tools=TOOLS, tool_choice="required", max_tokens=400, seed=6
    )

    check_call(call)
    assert first.choices[0].finish_reason == "tool_calls"
    for later in second.choices[0].message.tool_calls or []:
        check_call(later)
    assert second.choices[0].message.tool_calls
    assert usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached, kept = second.usage.prompt_tokens_details.cached_tokens, usage.total_tokens - 1
    assert cached is not None
    assert cached >= kept // PAGE_SIZE * PAGE_SIZE


async def test_a_streamed_call_of_a_named_function_adds_up_to_the_whole_one(
    cell: Cell, client: openai.AsyncOpenAI
) -> None:
    """The same seed gives the same call, piece by piece; it ends with stop."""
    fields: Any = {
        "model": cell.model, "messages": ASK, "tools": TOOLS, "seed": 7, "max_tokens": 400,
        "tool_choice": {"type": "function", "function": {"name": "wait"}},
    }  # fmt: skip
    whole = await client.chat.completions.create(**fields)
    name, arguments, finish = "", "", None
    async for chunk in await client.chat.completions.create(**fields, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or []:
            name += piece.function.name or ""
            arguments += piece.function.arguments or ""
        finish = chunk.choices[0].finish_reason or finish

    (call,) = whole.choices[0].message.tool_calls or []
    check_call(call)
    assert (name, arguments, finish) == ("wait", call.function.arguments, "stop")


async def test_strict_tools_hold_whatever_a_model_says(cell: Cell, client: openai.AsyncOpenAI) -> None:
    """It may say anything; a call, if it makes one, is valid, unless the end came first."""
    answer = await client.chat.completions.create(
        model=cell.model, messages=ASK, tools=TOOLS, max_tokens=120, n=4, seed=1, temperature=1
    )

    for choice in answer.choices:
        calls = choice.message.tool_calls or []
        assert choice.message.content or calls
        for call in calls[: None if choice.finish_reason == "tool_calls" else -1]:
            check_call(call)
