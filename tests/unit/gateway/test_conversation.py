"""Chat messages become what templates take, or a refusal that names the place."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.gateway import conversation
from services.gateway.openai_schema.chat import ChatMessage, ChatRequest
from services.gateway.replies.template_traits import TemplateTraits
from services.gateway.verbatim import Verbatim
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
    assert conversation.template_messages(given, traits=TemplateTraits(knows_developer=True))[0]["role"] == "developer"


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
        ({"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}, "messages[0].function_call"),
        ({"role": "assistant", "content": "Once", "prefix": True}, "messages[0].prefix"),
        ({"role": "assistant", "content": None, "audio": {"id": "a"}}, "messages[0].audio"),
    ],
)
def test_content_that_is_not_served_is_refused(message: dict[str, Any], param: str) -> None:
    """The error names the place."""
    with pytest.raises(InvalidRequest) as refusal:
        conversation.template_messages(messages(message))

    assert refusal.value.param == param


def call_with(arguments: Any, traits: TemplateTraits) -> Any:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (converted,) = conversation.template_messages(messages({"role": "assistant", "tool_calls": [call]}), traits=traits)
    return converted["tool_calls"][0]["function"]["arguments"]


def test_arguments_have_the_form_that_the_template_takes() -> None:
    """What is no JSON goes to every template as the text that it is."""
    text, verbatim, parsed = (TemplateTraits(arguments=kind) for kind in ("text", "verbatim", "object"))

    assert call_with("{ }", text) == "{ }"
    assert call_with({"a": "ü"}, text) == '{"a": "ü"}'
    assert call_with("", text) == "{}"
    assert isinstance(call_with("{ }", verbatim), Verbatim)
    assert call_with({"a": 1}, verbatim) == {"a": 1}
    assert call_with('{"a": 1}', parsed) == {"a": 1}
    assert [call_with("{oops", traits) for traits in (text, verbatim, parsed)] == ["{oops"] * 3
    assert call_with(None, parsed) == {}


def test_a_refusal_is_what_the_assistant_said() -> None:
    """As a field, or as a part of its content."""
    part = {"type": "refusal", "refusal": "no"}

    assert (
        conversation.template_messages(
            messages({"role": "assistant", "content": None, "refusal": "no"}, {"role": "assistant", "content": [part]})
        )
        == [{"role": "assistant", "content": "no"}] * 2
    )


def test_null_content_stays_null_for_a_template_that_tells_calls_by_it() -> None:
    """But not where there is text, or no call."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    given = messages(
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": "x", "tool_calls": [call]},
        {"role": "assistant", "content": None},
    )
    converted = conversation.template_messages(given, traits=TemplateTraits(needs_null_content=True))

    assert [message["content"] for message in converted] == [None, "x", ""]


def test_reasoning_goes_by_the_names_that_the_template_reads() -> None:
    """None of them where it reads none."""
    given = messages({"role": "assistant", "content": "a", "reasoning": "hm"})
    traits = TemplateTraits(reasoning_fields=("reasoning_content", "thinking"))

    assert conversation.template_messages(given, traits=traits) == [
        {"role": "assistant", "content": "a", "reasoning_content": "hm", "thinking": "hm"}
    ]
    assert conversation.template_messages(given) == [{"role": "assistant", "content": "a"}]


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
