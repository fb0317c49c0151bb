"""Chat messages become what templates take, or a refusal that names the place."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.gateway import conversation
from services.gateway.openai_schema.chat import ChatMessage, ChatRequest
from shared.errors import InvalidRequest


def messages(*items: dict[str, Any]) -> list[ChatMessage]:
    return msgspec.convert(list(items), list[ChatMessage])


def test_text_parts_are_joined_by_lines() -> None:
    """As vLLM does for templates that take strings."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    assert conversation.template_messages(messages({"role": "user", "content": parts})) == [
        {"role": "user", "content": "a\nb"}
    ]


def test_a_developer_is_a_system_where_the_template_knows_no_other() -> None:
    """And stays one where it does."""
    given = messages({"role": "developer", "content": "x"})

    assert conversation.template_messages(given)[0]["role"] == "system"
    assert conversation.template_messages(given, knows_developer=True)[0]["role"] == "developer"


def test_tool_calls_carry_objects_and_missing_content_is_empty() -> None:
    """Arguments are JSON text in the API and objects in templates."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    converted = conversation.template_messages(
        messages({"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "2", "tool_call_id": "1"})
    )

    assert converted[0]["content"] == ""
    assert converted[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert converted[1]["tool_call_id"] == "1"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0]"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_content_that_is_not_served_is_refused(message: dict[str, Any], param: str) -> None:
    """The error names the place."""
    with pytest.raises(InvalidRequest) as refusal:
        conversation.template_messages(messages(message))

    assert refusal.value.param == param


TOOL = {"type": "function", "function": {"name": "f"}}


def test_tools_need_a_template_with_a_place_for_them() -> None:
    """Elsewhere they are refused, with none they are not rendered."""
    assert conversation.template_tools([TOOL], "auto", {"tools"}) == [TOOL]
    assert conversation.template_tools([TOOL], "none", {"tools"}) is None
    assert conversation.template_tools([], None, set()) is None
    with pytest.raises(InvalidRequest) as refusal:
        conversation.template_tools([TOOL], None, {"messages"})
    assert (refusal.value.param, refusal.value.code) == ("tools", "unsupported_parameter")


@pytest.mark.parametrize(
    ("tools", "choice"), [([TOOL], "required"), ([TOOL], {"type": "function"}), (None, "required")]
)
def test_a_tool_call_cannot_be_forced(tools: Any, choice: Any) -> None:
    """tool_choice other than none and auto is refused."""
    with pytest.raises(InvalidRequest) as refusal:
        conversation.template_tools(tools, choice, {"tools"})

    assert refusal.value.param == "tool_choice"


def arguments_of(*variables: str, **fields: Any) -> dict[str, Any]:
    request = ChatRequest(messages=[ChatMessage(role="user", content="hi")], **fields)
    return conversation.template_arguments(request, frozenset(variables))


def test_template_arguments_cannot_take_the_renderers_own_names() -> None:
    """Anything else passes."""
    assert arguments_of(chat_template_kwargs={"enable_thinking": False}) == {"enable_thinking": False}
    with pytest.raises(InvalidRequest):
        arguments_of(chat_template_kwargs={"chat_template": "{{ 1 }}"})


def test_reasoning_effort_goes_to_templates_that_know_it() -> None:
    """What is said of it as a variable wins."""
    told = arguments_of("reasoning_effort", reasoning_effort="low")
    twice = arguments_of("reasoning_effort", reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"})

    assert told == {"reasoning_effort": "low"}
    assert twice == {"reasoning_effort": "high"}
    assert arguments_of("messages", reasoning_effort="low") == {}
