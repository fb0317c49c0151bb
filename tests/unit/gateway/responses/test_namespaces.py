"""Functions in namespaces, as agents send those of MCP servers: a chat has no groups, and calls are told in them."""

from __future__ import annotations

from typing import Any

import msgspec
import openai
import pytest

from services.gateway.openai_schema.chat import ChatRequest
from services.gateway.responses.conversion import chat_request, own_items
from services.gateway.responses.schema import ResponsesRequest
from services.gateway.responses.tools import names_of, repeated_tools
from services.gateway.responses.view import ResponsesView
from shared.errors import InvalidRequest
from tests.unit.gateway.responses.test_view import BEGUN, events_of
from tests.unit.gateway.running_gateway import tokenizer
from tests.unit.gateway.scripted_replies import generation, say

EMPTY = {"type": "object", "properties": {}}
LOOK = {"type": "function", "name": "look", "description": "Looks.", "parameters": EMPTY, "strict": False}
SEND = {"type": "function", "name": "send", "parameters": EMPTY}
MAIL = {"type": "namespace", "name": "mail", "description": "Letters.", "tools": [LOOK, SEND]}


def converted(**fields: Any) -> ChatRequest:
    asked = msgspec.convert({"input": "hi", "tools": [LOOK, MAIL], **fields}, ResponsesRequest)
    return chat_request(asked, own_items(asked, {}))


def test_functions_of_a_namespace_have_names_of_their_own() -> None:
    """Beside one of the same name outside; the first says what the namespace is for."""
    tools = converted().tools or []

    assert [tool["function"]["name"] for tool in tools] == ["look", "mail__look", "mail__send"]
    assert [tool["function"].get("description") for tool in tools] == ["Looks.", "Letters.\n\nLooks.", None]


def test_earlier_calls_and_choices_name_both() -> None:
    """As the model has seen them."""
    call = {"type": "function_call", "call_id": "c", "name": "send", "namespace": "mail", "arguments": "{}"}
    chat = converted(input=[{"role": "user", "content": "x"}, call])
    named = converted(tool_choice={"type": "function", "namespace": "mail", "name": "send"})
    allowed = [{"type": "function", "name": "look", "namespace": "mail"}, {"type": "function", "name": "look"}]
    chosen = converted(tool_choice={"type": "allowed_tools", "mode": "auto", "tools": allowed}).tool_choice

    assert [each["function"]["name"] for each in chat.messages[-1].tool_calls or ()] == ["mail__send"]
    assert named.tool_choice == {"type": "function", "function": {"name": "mail__send"}}
    assert isinstance(chosen, dict)
    assert [tool["name"] for tool in chosen["allowed_tools"]["tools"]] == ["mail__look", "look"]


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({**MAIL, "name": ""}, "tools[0].name"),
        ({**MAIL, "tools": []}, "tools[0].tools"),
        ({**MAIL, "tools": ["look"]}, "tools[0].tools"),
        ({**MAIL, "tools": [LOOK, {"type": "custom", "name": "c"}]}, "tools[0].tools[1].type"),
        ({**MAIL, "tools": [{"type": "function"}]}, "tools[0].tools[0].name"),
        ({**MAIL, "tools": [MAIL]}, "tools[0].tools[0].type"),
    ],
)
def test_what_is_no_namespace_of_functions_is_refused(tool: dict[str, Any], param: str) -> None:
    """With the place of what is wrong."""
    with pytest.raises(InvalidRequest) as caught:
        converted(tools=[tool])

    assert caught.value.param == param


def test_a_call_is_told_with_its_namespace() -> None:
    """In every event that names it; a function outside has none."""
    made = generation()
    names = {"weather": ("mail", "look")}
    view = ResponsesView(made, BEGUN, logprobs=None, texts=tokenizer().texts, names=names, now_ns=lambda: 1)
    data = b"".join(view.opening()) + (view.chunk(made.choices[0], say(made.choices[0], "caAd", "stop")) or b"")
    view.finish()
    events = events_of(data + b"".join(view.closing()))

    added = [event.item for event in events if event.type == "response.output_item.added"]
    done = [event.name for event in events if event.type == "response.function_call_arguments.done"]
    assert [(item.namespace, item.name) for item in added] == [("mail", "look"), (None, "time")]
    assert done == ["look", "time"]
    assert events[-1].response.output[0].namespace == "mail"


def test_a_response_repeats_its_namespaces() -> None:
    """With the fields that were read; OpenAI's client reads them."""
    told = repeated_tools([{**MAIL, "junk": 1}])
    read = msgspec.json.encode(msgspec.structs.replace(BEGUN, tools=told, status="completed"))
    response = openai.types.responses.Response.model_validate_json(read)

    assert told == [MAIL]
    assert response.tools[0].type == "namespace"
    assert names_of(told) == {"mail__look": ("mail", "look"), "mail__send": ("mail", "send")}
