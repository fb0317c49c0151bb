"""Tools and reasoning through both agents' APIs, with the official clients and a template that knows both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pydantic
import pytest

from shared.messages.base import unpack_int32
from tests.unit.gateway.replies.families import QWEN3, family_tokenizer
from tests.unit.gateway.running_gateway import Harness, running_gateway

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city":  "Oslo"}}\n</tool_call>'
ANSWER = f"<think>\nWhere?\n</think>\n\nI look.\n{CALL}"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


class Spoken:
    """A model that says one text after another, three characters to a token."""

    def __init__(self, *texts: str) -> None:
        self._texts = list(texts)

    def __call__(self, request: Any) -> list[tuple[int, str]]:
        text = self._texts.pop(0) if len(self._texts) > 1 else self._texts[0]
        return [(5, text[at : at + 3]) for at in range(0, len(text), 3)]


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    """A gateway whose model reasons, and first calls a tool."""
    tokenizer = family_tokenizer(tmp_path, QWEN3)
    async with running_gateway(Spoken(ANSWER, "Cold."), over_http=True, model_tokenizer=tokenizer) as made:
        yield made


def prompt_of(harness: Harness, number: int) -> str:
    prompt = list(unpack_int32(harness.cell.submitted[number].prompt))
    return harness.gateway.tokenizer.decode(prompt)


async def test_a_tools_result_goes_back_in_messages(harness: Harness) -> None:
    """The model gets its own turn back as it said it, reasoning and arguments to the letter, and the result."""
    tools: Any = [{"name": "weather", "description": "d", "input_schema": SCHEMA}]
    asked: list[Any] = [{"role": "user", "content": "Weather?"}]
    async with anthropic.AsyncAnthropic(base_url=harness.base_url, api_key="none", max_retries=0) as client:
        first = await client.messages.create(model="test-model", max_tokens=200, messages=asked, tools=tools)
        call = first.content[-1]
        assert call.type == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "-3"}
        talk = [*asked, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = await client.messages.create(model="test-model", max_tokens=200, messages=talk, tools=tools)

    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert (call.name, call.input, first.stop_reason) == ("weather", {"city": "Oslo"}, "tool_use")
    assert getattr(first.content[0], "thinking", "").strip() == "Where?"
    assert getattr(first.content[1], "text", "").strip() == "I look."
    assert second.stop_reason == "end_turn"
    assert "<think>\nWhere?\n</think>" in prompt_of(harness, 1)
    assert CALL in prompt_of(harness, 1)
    assert prompt_of(harness, 1).index("<tool_call>\n{") < prompt_of(harness, 1).index("-3")


async def test_a_streamed_tool_call_in_messages(harness: Harness) -> None:
    """The client puts thinking, text and input together again."""
    tools: Any = [{"name": "weather", "input_schema": SCHEMA}]
    async with (
        anthropic.AsyncAnthropic(base_url=harness.base_url, api_key="none", max_retries=0) as client,
        client.messages.stream(
            model="test-model", max_tokens=200, messages=[{"role": "user", "content": "Weather?"}], tools=tools
        ) as stream,
    ):
        kinds = [event.type async for event in stream]
        final = await stream.get_final_message()

    assert {"thinking", "text", "input_json", "signature"} <= set(kinds)
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
    assert getattr(final.content[-1], "input", None) == {"city": "Oslo"}
    assert final.stop_reason == "tool_use"


async def test_a_tools_result_goes_back_in_responses(harness: Harness) -> None:
    """By what is kept, and by hand: the prompt is the same, and the arguments are as the model said them."""
    tools: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
    async with openai.AsyncOpenAI(base_url=f"{harness.base_url}/v1", api_key="none", max_retries=0) as client:
        first = await client.responses.create(model="test-model", input="Weather?", tools=tools)
        reasoning, text, call = first.output
        assert call.type == "function_call"
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "-3"}
        kept = await client.responses.create(
            model="test-model", input=[result], tools=tools, previous_response_id=first.id
        )
        talk: Any = [{"role": "user", "content": "Weather?"}, *first.output, result]
        await client.responses.create(model="test-model", input=talk, tools=tools)
        items = await client.responses.input_items.list(kept.id, order="asc")

    assert (reasoning.type, text.type) == ("reasoning", "message")
    assert call.arguments == '{"city":  "Oslo"}'
    assert prompt_of(harness, 1) == prompt_of(harness, 2)
    assert CALL in prompt_of(harness, 1)
    assert kept.output_text == "Cold."
    assert [item.type for item in items.data] == [
        "message", "reasoning", "message", "function_call", "function_call_output",
    ]  # fmt: skip


class Weather(pydantic.BaseModel):
    """The arguments of the tool."""

    city: str


async def test_a_streamed_tool_call_in_responses(harness: Harness) -> None:
    """The client's own helper parses the arguments."""
    async with openai.AsyncOpenAI(base_url=f"{harness.base_url}/v1", api_key="none", max_retries=0) as client:
        function = openai.pydantic_function_tool(Weather, name="weather")["function"]
        tool: Any = {"type": "function", **function, "strict": True}
        async with client.responses.stream(model="test-model", input="Weather?", tools=[tool]) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()

    assert kinds.count("response.function_call_arguments.done") == 1
    assert "response.reasoning_text.delta" in kinds
    assert final.output[-1].type == "function_call"
    assert final.status == "completed"


@pytest.mark.parametrize(("thinking", "shown"), [("disabled", True), ("enabled", False)])
async def test_thinking_is_switched_in_the_template(harness: Harness, thinking: Any, shown: bool) -> None:
    """Where it has a switch: this one closes reasoning that nobody wants."""
    setting: Any = {"type": thinking, **({"budget_tokens": 1024} if thinking == "enabled" else {})}
    async with anthropic.AsyncAnthropic(base_url=harness.base_url, api_key="none", max_retries=0) as client:
        await client.messages.create(
            model="test-model", max_tokens=200, messages=[{"role": "user", "content": "hi"}], thinking=setting
        )

    assert ("<think>\n\n</think>" in prompt_of(harness, 0)) is shown


async def test_a_call_can_be_forced_in_both(harness: Harness) -> None:
    """The cell gets a grammar."""
    anthropics: Any = [{"name": "weather", "input_schema": SCHEMA}]
    openais: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA}]
    async with anthropic.AsyncAnthropic(base_url=harness.base_url, api_key="none", max_retries=0) as client:
        await client.messages.create(
            model="test-model", max_tokens=200, messages=[{"role": "user", "content": "hi"}], tools=anthropics,
            tool_choice={"type": "tool", "name": "weather"},
        )  # fmt: skip
    async with openai.AsyncOpenAI(base_url=f"{harness.base_url}/v1", api_key="none", max_retries=0) as openai_client:
        await openai_client.responses.create(
            model="test-model", input="hi", tools=openais, tool_choice={"type": "function", "name": "weather"}
        )

    first, second = (request.sampling.grammar for request in harness.cell.submitted)
    assert first is not None
    assert first == second


async def test_an_answer_keeps_to_a_schema_in_both() -> None:
    """The cell gets the same grammar, and the clients' own helpers parse what comes."""
    said = [(5, '{"city"'), (5, ': "Oslo"}')]
    async with running_gateway(lambda request: said, over_http=True) as harness:
        async with openai.AsyncOpenAI(base_url=f"{harness.base_url}/v1", api_key="none", max_retries=0) as client:
            parsed = await client.responses.parse(model="test-model", input="hi", text_format=Weather)
            loose = await client.responses.create(
                model="test-model", input="hi", text={"format": {"type": "json_object"}}
            )
            bad: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}}
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.create(model="test-model", input="hi", text=bad)
        async with anthropic.AsyncAnthropic(base_url=harness.base_url, api_key="none", max_retries=0) as other:
            message = await other.messages.parse(
                model="test-model", max_tokens=50, messages=[{"role": "user", "content": "hi"}], output_format=Weather
            )

    assert parsed.output_parsed == Weather(city="Oslo")
    assert message.parsed_output == Weather(city="Oslo")
    assert loose.text is not None
    assert loose.text.format is not None
    assert loose.text.format.type == "json_object"
    assert str(refused.value.param).startswith("text.format")
    by_schema, any_object, _ = (request.sampling.grammar for request in harness.cell.submitted)
    assert by_schema is not None
    assert any_object is not None
    assert by_schema != any_object
    assert all(request.sampling.grammar is not None for request in harness.cell.submitted)
