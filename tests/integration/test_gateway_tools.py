"""The official OpenAI client calls tools and reads reasoning, over a real server and a scripted cell."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from services.gateway.tokenizer import Tokenizer
from shared.messages.base import unpack_int32
from shared.messages.requests import SubmitRequest
from tests.unit.gateway.replies import families
from tests.unit.gateway.running_gateway import Harness, running_gateway
from tests.unit.gateway.scripted_cell import Step

SCHEMA = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "look", "description": "Look there.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "wait"}},
]
ASK: Any = [{"role": "user", "content": "How is it?"}]
ARGUMENTS = '{"place":  "Rome"}'
CALLS = (
    f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
)
TAGGED = (
    "<tool_call>\n<function=look>\n<parameter=place>\nRome,\n  1\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=wait>\n</function>\n</tool_call>"
)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    """A tokenizer with a template of Qwen's shape, to which the marks are special tokens."""
    made = families.family_tokenizer(tmp_path_factory.mktemp("qwen"), families.QWEN3, specials=families.SPECIALS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    """A tokenizer whose template opens reasoning itself."""
    made = families.family_tokenizer(tmp_path_factory.mktemp("deepseek"), families.DEEPSEEK)
    yield made
    made.close()


def says(tokenizer: Tokenizer, *texts: str) -> Callable[[SubmitRequest], Sequence[Step]]:
    """A script that answers a choice with the text of its place, over and over."""

    def script(request: SubmitRequest) -> Sequence[Step]:
        text = texts[int(request.request_id.rpartition("-")[2]) % len(texts)]
        return [(token, tokenizer.decode([token])) for token in tokenizer.encode_now(text, add_special_tokens=False)]

    return script


@asynccontextmanager
async def asking(
    tokenizer: Tokenizer, *texts: str, **settings: Any
) -> AsyncIterator[tuple[openai.AsyncOpenAI, Harness]]:
    async with running_gateway(
        says(tokenizer, *texts), over_http=True, model_tokenizer=tokenizer, **settings
    ) as harness:
        harness.cell.pace_s = 0.0005
        async with openai.AsyncOpenAI(base_url=f"{harness.base_url}/v1", api_key="none", max_retries=0) as client:
            yield client, harness


async def streamed(client: openai.AsyncOpenAI, **fields: Any) -> dict[int, dict[str, Any]]:
    """What a streamed answer adds up to, by choice."""
    stream = await client.chat.completions.create(model="test-model", messages=ASK, stream=True, **fields)
    found: dict[int, dict[str, Any]] = {}
    async for chunk in stream:
        for choice in chunk.choices:
            mine = found.setdefault(choice.index, {"content": "", "reasoning": "", "calls": {}, "finish": None})
            mine["content"] += choice.delta.content or ""
            mine["reasoning"] += (choice.delta.model_extra or {}).get("reasoning_content", "")
            mine["finish"] = choice.finish_reason or mine["finish"]
            for call in choice.delta.tool_calls or []:
                assert call.function is not None
                known = mine["calls"].setdefault(call.index, {"id": call.id, "name": call.function.name, "pieces": []})
                assert known["id"] == (call.id or known["id"])
                known["pieces"].append(call.function.arguments)
    return found


async def test_calls_have_names_ids_and_verbatim_arguments(qwen: Tokenizer) -> None:
    """Several in one answer; content is null where there is none."""
    async with asking(qwen, CALLS) as (client, harness):
        answer = await client.chat.completions.create(model="test-model", messages=ASK, tools=TOOLS)
        told = harness.cell.submitted[0].sampling

    (choice,) = answer.choices
    calls = choice.message.tool_calls or []
    assert [(call.function.name, call.function.arguments) for call in calls if call.type == "function"] == [
        ("look", ARGUMENTS),
        ("wait", "{}"),
    ]
    assert len({call.id for call in calls}) == 2
    assert all(call.id.startswith("call_") for call in calls)
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    assert told.grammar is None
    assert {qwen.decode([token]) for token in told.shown_special_tokens} == {
        "<tool_call>", "</tool_call>", "<think>", "</think>",
    }  # fmt: skip


async def test_a_stream_adds_up_to_the_whole_answer(qwen: Tokenizer) -> None:
    """Each choice by itself; arguments come in pieces."""
    texts = ("<think>\nhm\n</think>\n\nLet me see.\n" + CALLS, "Fine, thanks.")
    async with asking(qwen, *texts) as (client, _):
        whole = await client.chat.completions.create(model="test-model", messages=ASK, tools=TOOLS, n=2)
        parts = await streamed(client, tools=TOOLS, n=2)

    for choice in whole.choices:
        message, mine = choice.message, parts[choice.index]
        assert (message.content or "") == mine["content"]
        assert (message.model_extra or {}).get("reasoning_content", "") == mine["reasoning"]
        assert choice.finish_reason == mine["finish"]
        assert [call.function.arguments for call in message.tool_calls or [] if call.type == "function"] == [
            "".join(call["pieces"]) for call in mine["calls"].values()
        ]
    assert (parts[0]["content"], parts[0]["reasoning"], parts[0]["finish"]) == ("Let me see.", "hm", "tool_calls")
    assert (parts[1]["content"], parts[1]["calls"], parts[1]["finish"]) == ("Fine, thanks.", {}, "stop")
    assert len(parts[0]["calls"][0]["pieces"]) > 3


async def test_a_malformed_call_is_content(qwen: Tokenizer) -> None:
    """Streamed or not, and never an error."""
    text = '<tool_call>\n{"name": look}\n</tool_call>'
    async with asking(qwen, text) as (client, _):
        whole = await client.chat.completions.create(model="test-model", messages=ASK, tools=TOOLS)
        parts = await streamed(client, tools=TOOLS)

    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (text, "stop")
    assert not whole.choices[0].message.tool_calls
    assert (parts[0]["content"], parts[0]["finish"]) == (text, "stop")


async def test_without_tools_nothing_is_a_call(qwen: Tokenizer) -> None:
    """Nor where the choice is none; the tools stay in the prompt then, so that its beginning stays the same."""
    async with asking(qwen, CALLS) as (client, harness):
        plain = await client.chat.completions.create(model="test-model", messages=ASK)
        auto = await client.chat.completions.create(model="test-model", messages=ASK, tools=TOOLS)
        none = await client.chat.completions.create(model="test-model", messages=ASK, tools=TOOLS, tool_choice="none")
        prompts = [request.prompt for request in harness.cell.submitted]

    assert plain.choices[0].message.content == none.choices[0].message.content == CALLS
    assert not plain.choices[0].message.tool_calls
    assert not none.choices[0].message.tool_calls
    assert auto.choices[0].message.tool_calls
    assert prompts[1] == prompts[2] != prompts[0]


async def test_reasoning_that_the_prompt_opens_is_split_off_and_counted(deepseek: Tokenizer) -> None:
    """Its tokens are among the answer's."""
    async with asking(deepseek, "ab\n</think>\n\nYes.") as (client, _):
        answer = await client.chat.completions.create(model="test-model", messages=ASK)
        parts = await streamed(client)

    message, usage = answer.choices[0].message, answer.usage
    assert message.content == parts[0]["content"] == "Yes."
    assert (message.model_extra or {})["reasoning_content"] == parts[0]["reasoning"] == "ab"
    assert usage is not None
    assert usage.completion_tokens_details is not None
    # The mark is text to this tokenizer: as far as it is not complete its tokens count.
    close = len(deepseek.encode_now("</think>", add_special_tokens=False))
    before = len(deepseek.encode_now("ab\n", add_special_tokens=False))
    assert usage.completion_tokens_details.reasoning_tokens == before + close - 1


async def test_reasoning_can_be_switched_off(qwen: Tokenizer) -> None:
    """By the template, which closes it; then all is content."""
    async with asking(qwen, "Yes </think> no") as (client, harness):
        answer = await client.chat.completions.create(
            model="test-model", messages=ASK, extra_body={"chat_template_kwargs": {"enable_thinking": False}}
        )
        prompt = qwen.decode(unpack_int32(harness.cell.submitted[0].prompt))

    assert prompt.endswith("<think>\n\n</think>\n\n")
    assert answer.choices[0].message.content == "Yes </think> no"


async def test_parsers_can_be_switched_off(qwen: Tokenizer) -> None:
    """Everything is content then, and a call cannot be forced."""
    text = "<think>hm</think>" + CALLS
    async with asking(qwen, text, tool_parser="none", reasoning_parser="none") as (client, _):
        answer = await client.chat.completions.create(model="test-model", messages=ASK, tools=TOOLS)
        with pytest.raises(openai.BadRequestError) as refusal:
            await client.chat.completions.create(model="test-model", messages=ASK, tools=TOOLS, tool_choice="required")

    assert answer.choices[0].message.content == text
    assert refusal.value.param == "tool_choice"


@pytest.mark.parametrize("name", ["hermes", "qwen3", "qwen3_coder", "mistral"])
async def test_the_next_turn_begins_with_everything_that_was_said(name: str, tmp_path: Path) -> None:
    """Prompt and answer of the first turn, token by token, with its reasoning and whatever blanks arguments have."""
    template, text = {
        "hermes": (families.HERMES, "Let me see.\n" + CALLS),
        "qwen3": (families.QWEN3, "<think>\nhm\n</think>\n\nLet me see.\n" + CALLS),
        "qwen3_coder": (families.QWEN3_CODER, "Let me see.\n" + TAGGED),
        "mistral": (
            families.MISTRAL,
            f'[TOOL_CALLS] [{{"name": "look", "arguments": {ARGUMENTS}}}, {{"name": "wait", "arguments": {{}}}}]',
        ),
    }[name]
    tokenizer = families.family_tokenizer(tmp_path, template, specials=families.SPECIALS)
    async with asking(tokenizer, text) as (client, harness):
        answer = await client.chat.completions.create(model="test-model", messages=ASK, tools=TOOLS)
        message = answer.choices[0].message
        calls = message.tool_calls or []
        results: Any = [
            {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "r"}]} for call in calls
        ]
        said: Any = message.model_dump(exclude_none=True)
        await client.chat.completions.create(model="test-model", messages=[*ASK, said, *results], tools=TOOLS)
        first, second = (unpack_int32(request.prompt) for request in harness.cell.submitted)
    end = tokenizer.encode_now(text + "<|end|>", add_special_tokens=False)
    tokenizer.close()

    assert len(calls) == 2
    assert second[: len(first) + len(end)] == [*first, *end]


async def test_what_was_forced_reaches_the_worker_as_a_grammar(qwen: Tokenizer) -> None:
    """A named function's call ends with stop, as OpenAI has it."""
    named: Any = {"type": "function", "function": {"name": "look"}}
    async with asking(qwen, CALLS.partition("\n<tool_call>")[0]) as (client, harness):
        one = await client.chat.completions.create(model="test-model", messages=ASK, tools=TOOLS, tool_choice=named)
        some = await client.chat.completions.create(
            model="test-model", messages=ASK, tools=TOOLS, tool_choice="required"
        )
        grammars = [request.sampling.grammar for request in harness.cell.submitted]

    assert [answer.choices[0].finish_reason for answer in (one, some)] == ["stop", "tool_calls"]
    assert all(answer.choices[0].message.tool_calls for answer in (one, some))
    assert all(grammar is not None and grammar.kind == "lark" for grammar in grammars)
    assert grammars[0] is not None
    assert "wait" not in grammars[0].text


async def test_a_tool_whose_schema_does_not_compile_is_named(qwen: Tokenizer) -> None:
    """By its field in the API that was called, and not with the grammar of all tools."""
    fault = {"type": "object", "properties": {"place": {"type": "string", "pattern": "(?=x)"}}}
    schemas = [SCHEMA, fault, SCHEMA]
    functions = [{"name": f"tool_{number}", "parameters": schema} for number, schema in enumerate(schemas)]
    custom = [{"name": each["name"], "input_schema": each["parameters"]} for each in functions]
    async with asking(qwen, "so") as (_, harness):
        chat = {"messages": ASK, "tools": [{"type": "function", "function": each} for each in functions]}
        message = {"messages": ASK, "max_tokens": 8, "tools": custom, "tool_choice": {"type": "any"}}
        answers = [
            await harness.client.post("/v1/chat/completions", json=chat | {"tool_choice": "required"}),
            await harness.client.post("/v1/messages", json=message),
        ]
        unbound = await harness.client.post("/v1/chat/completions", json=chat)

    refused = [answer.json()["error"] for answer in answers]
    assert [each["code"] for each in refused] == ["invalid_grammar"] * 2
    assert [each["param"] for each in refused] == ["tools[1].function.parameters", "tools[1].input_schema"]
    assert not any("tool_call" in each["message"] for each in refused)
    assert unbound.status_code == 200
