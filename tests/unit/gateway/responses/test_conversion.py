"""What a request of the Responses API means as a chat."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.gateway.openai_schema.chat import ChatRequest
from services.gateway.responses.conversion import (
    chat_request,
    check_responses,
    own_items,
    repeated_format,
)
from services.gateway.responses.schema import ResponsesRequest
from services.gateway.responses.tools import repeated_choice, repeated_tools
from shared.errors import InvalidRequest
from shared.messages.requests import MAX_GRAMMAR_BYTES


def request(**fields: Any) -> ResponsesRequest:
    return msgspec.convert({"model": "m", "input": "hi", **fields}, ResponsesRequest)


def converted(**fields: Any) -> ChatRequest:
    asked = request(**fields)
    check_responses(asked)
    return chat_request(asked, own_items(asked, {}))


def said(chat: ChatRequest) -> list[tuple[str, str, int]]:
    """Role, texts and number of calls of each message."""
    return [
        (
            message.role,
            message.content
            if isinstance(message.content, str)
            else "|".join(p.text or "" for p in message.content or ()),
            len(message.tool_calls or ()),
        )
        for message in chat.messages
    ]


def test_a_text_is_a_message_of_the_user() -> None:
    """Behind the instructions."""
    assert said(converted(instructions="be short")) == [("system", "be short", 0), ("user", "hi", 0)]


def test_items_of_a_turn_are_one_message() -> None:
    """Reasoning, text and calls together; what a tool said stands alone."""
    chat = converted(
        input=[
            {"role": "developer", "content": "rules"},
            {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
            {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'},
            {"type": "function_call", "call_id": "c2", "name": "time", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "cold"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "user", "content": "why?"},
        ]
    )

    assert said(chat) == [
        ("developer", "rules", 0),
        ("user", "weather?", 0),
        ("assistant", "I look.", 2),
        ("tool", "cold", 0),
        ("tool", "noon", 0),
        ("assistant", "no", 0),
        ("user", "why?", 0),
    ]
    assert [message.reasoning_content for message in chat.messages[1:4]] == [None, "hm", None]
    assert [message.tool_call_id for message in chat.messages if message.role == "tool"] == ["c1", "c2"]
    calls = chat.messages[2].tool_calls or []
    assert calls[0] == {
        "id": "c1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
    }


def test_fields_keep_their_meaning() -> None:
    """Those of chats under their names there."""
    chat = converted(
        max_output_tokens=7, temperature=0.5, top_p=0.9, top_logprobs=2, stream=True, user="u", cache_salt="s",
        reasoning={"effort": "low", "summary": "auto"}, prompt_cache_key="k", prompt_cache_retention="24h",
        parallel_tool_calls=False,
    )  # fmt: skip

    assert (chat.max_completion_tokens, chat.temperature, chat.top_p, chat.stream) == (7, 0.5, 0.9, True)
    assert (chat.logprobs, chat.top_logprobs, chat.user, chat.cache_salt) == (True, 2, "u", "s")
    assert (chat.reasoning_effort, chat.prompt_cache_key, chat.prompt_cache_retention) == ("low", "k", "24h")
    assert chat.parallel_tool_calls is False
    assert converted(include=["message.output_text.logprobs"]).logprobs is True
    assert converted(include=["reasoning.encrypted_content"]).logprobs is None


def test_fields_of_a_chat_are_those_of_a_chat() -> None:
    """Whatever has neither another name here nor another meaning."""
    chat = converted(
        stop="x", logit_bias={"5": 1.0}, repetition_penalty=1.5, ignore_eos=True, guided_regex="a+", bad_words=["x"],
        chat_template_kwargs={"note": "x"}, skip_special_tokens=False, n=1,
        stream_options={"include_obfuscation": False},
    )  # fmt: skip

    assert (chat.stop, chat.logit_bias, chat.repetition_penalty, chat.ignore_eos) == ("x", {"5": 1.0}, 1.5, True)
    assert (chat.guided_regex, chat.bad_words, chat.skip_special_tokens) == ("a+", ["x"], False)
    assert (chat.chat_template_kwargs, chat.stream_options) == ({"note": "x"}, None)


def test_tools_and_formats_are_nested() -> None:
    """As chats have them."""
    schema = {"type": "object"}
    chat = converted(
        tools=[{"type": "function", "name": "f", "parameters": schema, "strict": True, "description": None}],
        tool_choice={"type": "function", "name": "f"},
        text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
    )

    assert chat.tools == [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]
    assert chat.tool_choice == {"type": "function", "function": {"name": "f"}}
    assert chat.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": schema, "strict": True},
    }
    assert converted(text={"format": {"type": "json_object"}}).response_format == {"type": "json_object"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"n": 2}, "n"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"explain": True}, "explain"),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"content": "x"}]}, "input[0].type"),
        ({"input": [{"type": "message", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
    ],
)
def test_what_would_change_the_answer_is_refused(fields: dict[str, Any], param: str) -> None:
    """By the name of its field."""
    with pytest.raises(InvalidRequest) as refused:
        converted(**fields)

    assert refused.value.param == param


def test_a_response_repeats_only_what_was_read() -> None:
    """It is kept as well, and other fields could be of any size."""
    junk = "x" * 100_000
    asked = request(
        text={"format": {"type": "text", "junk": junk, "schema": {"x": junk}}},
        tools=[{"type": "function", "name": "f", "parameters": {}, "strict": None, "junk": junk}],
        tool_choice={"type": "function", "name": "f", "junk": junk},
    )
    shaped = request(text={"format": {"type": "json_schema", "name": "n", "schema": {}, "strict": True, "junk": junk}})

    assert msgspec.to_builtins(repeated_format(asked.text)) == {"type": "text"}
    assert repeated_tools(asked.tools) == [{"type": "function", "name": "f", "parameters": {}, "strict": None}]
    assert repeated_choice(asked.tool_choice) == {"type": "function", "name": "f"}
    assert msgspec.to_builtins(repeated_format(shaped.text)) == {
        "type": "json_schema", "name": "n", "schema": {}, "strict": True,
    }  # fmt: skip
    assert msgspec.to_builtins(repeated_format(None)) == {"type": "text"}
    assert repeated_choice(None) == "auto"


def test_a_schema_is_as_long_as_a_grammar_at_most() -> None:
    """Also where what makes it long says nothing about texts."""
    schema = {"type": "object", "description": "x" * MAX_GRAMMAR_BYTES}
    with pytest.raises(InvalidRequest, match="65536") as refused:
        converted(text={"format": {"type": "json_schema", "name": "n", "schema": schema}})

    assert refused.value.param == "text.format.schema"


@pytest.mark.parametrize(
    "fields",
    [{"reasoning": {"effort": "x" * 65}}, {"reasoning": {"summary": "x" * 65}}, {"text": {"verbosity": "x" * 65}},
     {"text": {"format": {"type": "json_schema", "name": "x" * 65}}}, {"text": {"format": {"type": "x" * 65}}}],
)  # fmt: skip
def test_words_are_short(fields: dict[str, Any]) -> None:
    """They are repeated and kept."""
    with pytest.raises(msgspec.ValidationError, match="64"):
        request(**fields)
