"""What a request of the Messages API means as a chat."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.gateway.messages_api.conversion import chat_request
from services.gateway.messages_api.schema import MessagesRequest
from services.gateway.openai_schema.chat import ChatRequest
from shared.errors import InvalidRequest

HELLO = [{"role": "user", "content": "hi"}]


def converted(*, variables: tuple[str, ...] = (), reasons: bool = False, **fields: Any) -> ChatRequest:
    body = {"model": "m", "max_tokens": 9, "messages": HELLO, **fields}
    return chat_request(msgspec.convert(body, MessagesRequest), variables, reasons=reasons)


def messages_of(chat: ChatRequest) -> list[dict[str, Any]]:
    """Messages without what is absent."""
    return [
        {name: value for name, value in message.items() if value is not None}
        for message in msgspec.to_builtins(chat.messages)
    ]


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": each, "cache_control": None, "refusal": None} for each in texts]


def test_a_conversation_with_tools() -> None:
    """Calls go with their turn, results are messages of their own, in their place."""
    chat = converted(
        system="be short",
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "weather?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "cold"}]},
                    {"type": "tool_result", "tool_use_id": "c2", "content": "no such city", "is_error": True},
                    {"type": "text", "text": "and now?"},
                ],
            },
        ],
    )

    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    assert messages_of(chat) == [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": text("weather?")},
        {"role": "assistant", "content": text("I look."), "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": text("cold")},
        {"role": "tool", "tool_call_id": "c2", "content": text("Error: no such city")},
        {"role": "user", "content": text("and now?")},
    ]


def test_arguments_stand_as_they_were_said() -> None:
    """Where their text is known, or came back because it is no JSON; else as the object."""
    calls = [
        {"type": "tool_use", "id": "known", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "id": "other", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "id": "cut", "name": "f", "input": {"INVALID_JSON": '{"a":'}},
    ]
    body = {"model": "m", "max_tokens": 9, "messages": [*HELLO, {"role": "assistant", "content": calls}, *HELLO]}
    chat = chat_request(
        msgspec.convert(body, MessagesRequest), (), said=lambda call, given: "{ }" if call == "known" else None
    )

    made = chat.messages[1].tool_calls or []
    assert [call["function"]["arguments"] for call in made] == ["{ }", {"a": 1}, '{"a":']


def test_fields_keep_their_meaning() -> None:
    """Bounds, sampling and what is Thermocline's own."""
    chat = converted(
        max_tokens=7, stop_sequences=["x"], temperature=0.5, top_p=0.9, top_k=4, stream=True, seed=3,
        metadata={"user_id": "u"}, cache_salt="s", deadline_ms=5, output_config={"effort": "low"},
    )  # fmt: skip

    assert (chat.max_tokens, chat.stop, chat.temperature, chat.top_p, chat.top_k) == (7, ["x"], 0.5, 0.9, 4)
    assert (chat.stream, chat.user, chat.cache_salt, chat.deadline_ms, chat.seed) == (True, "u", "s", 5, 3)
    assert chat.reasoning_effort == "low"
    assert chat.continue_final_message is None


@pytest.mark.parametrize(
    ("choice", "tool_choice", "parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", None),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}, None),
    ],
)
def test_tools_and_their_choice(choice: dict[str, Any], tool_choice: object, parallel: bool | None) -> None:
    """In OpenAI's words."""
    schema = {"type": "object", "properties": {}}
    chat = converted(
        tools=[{"name": "f", "description": "d", "input_schema": schema, "strict": True}], tool_choice=choice
    )

    function = {"name": "f", "description": "d", "parameters": schema, "strict": True}
    assert chat.tools == [{"type": "function", "function": function}]
    assert (chat.tool_choice, chat.parallel_tool_calls) == (tool_choice, parallel)


def test_breakpoints_stand_where_they_were() -> None:
    """At tools, the system prompt, texts, results, and, for the request itself, its last text."""
    mark = {"type": "ephemeral", "ttl": "1h"}
    chat = converted(
        tools=[{"name": "f", "input_schema": {}, "cache_control": mark}],
        system=[{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r", "cache_control": mark}],
            },
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        ],
        cache_control={"type": "ephemeral", "ttl": "5m"},
    )

    found = [
        part.cache_control.ttl if part.cache_control else None
        for message in chat.messages
        if isinstance(message.content, list)
        for part in message.content
    ]
    assert found == ["5m", "1h", None, "5m"]
    assert (chat.tools or [{}])[0]["cache_control"] == mark


def test_a_final_answer_is_continued() -> None:
    """Text that the caller put in the model's mouth."""
    chat = converted(messages=[*HELLO, {"role": "assistant", "content": "The best answer is ("}])

    assert chat.continue_final_message is True


def test_a_header_for_accounts_is_left_out() -> None:
    """It differs in each request, and in front of everything nothing behind it would be found again."""
    parts = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=abc"},
        {"type": "text", "text": "s"},
    ]

    assert messages_of(converted(system=parts))[0] == {"role": "system", "content": text("s")}
    assert messages_of(converted(system=parts[:1]))[0]["role"] == "user"


@pytest.mark.parametrize(
    ("variables", "reasons", "thinking", "arguments"),
    [
        (("enable_thinking",), False, "enabled", {"enable_thinking": True}),
        (("enable_thinking",), False, "disabled", {"enable_thinking": False}),
        (("thinking",), False, "enabled", {"thinking": True}),
        (("enable_thinking",), False, "adaptive", None),
        ((), True, "enabled", None),
        ((), False, "disabled", None),
    ],
)
def test_thinking_is_the_templates_switch(
    variables: tuple[str, ...], reasons: bool, thinking: str, arguments: object
) -> None:
    """Under the name that the template has for it."""
    chat = converted(variables=variables, reasons=reasons, thinking={"type": thinking, "budget_tokens": 2048})

    assert chat.chat_template_kwargs == arguments


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"container": "c"}, "container"),
        ({"compaction": {}}, "compaction"),
        ({"fallbacks": [{"model": "other"}]}, "fallbacks"),
        ({"output_format": {"type": "json_schema", "schema": {}}}, "output_format"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"stop": ["x"]}, "stop"),
        ({"n": 2}, "n"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        (
            {"messages": [*HELLO, {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f"}]}]},
            "messages",
        ),
    ],
)
def test_what_would_change_the_answer_is_refused(fields: dict[str, Any], param: str) -> None:
    """By the name of its field."""
    with pytest.raises(InvalidRequest) as refused:
        converted(**fields)

    assert refused.value.param == param


def test_fields_of_a_chat_are_those_of_a_chat() -> None:
    """Whatever has neither another name here nor another meaning."""
    chat = converted(
        variables=("thinking",), structured_outputs={"regex": "a+"}, repetition_penalty=1.5, bad_words=["x"],
        stop_token_ids=[7], chat_template_kwargs={"note": "x"}, thinking={"type": "enabled"}, mcp_servers=[],
        parallel_tool_calls=False, n=1,
    )  # fmt: skip

    assert chat.structured_outputs is not None
    assert (chat.structured_outputs.regex, chat.repetition_penalty, chat.bad_words) == ("a+", 1.5, ["x"])
    assert (chat.stop_token_ids, chat.parallel_tool_calls) == ([7], False)
    assert chat.chat_template_kwargs == {"thinking": True, "note": "x"}
    assert chat.thinking is None


def test_a_switch_that_does_not_exist_is_refused() -> None:
    """Of reasoning there are three."""
    with pytest.raises(msgspec.ValidationError, match="thinking"):
        converted(thinking={"type": "bogus"})


def test_edits_that_change_nothing_pass() -> None:
    """All of the reasoning is kept here in any case."""
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]

    assert converted(context_management={"edits": edits}).messages == converted().messages


def test_a_schema_becomes_a_response_format() -> None:
    """As in OpenAI's API."""
    chat = converted(output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}})

    assert chat.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": {"type": "object"}, "strict": True},
    }
