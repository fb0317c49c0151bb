"""What a request says about tools is understood, or refused with the place of its fault."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.replies.tool_choice import MAX_TOOLS, asked_tools, check_rendered
from shared.errors import InvalidRequest


def tool(name: str = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def allowed(*names: str, mode: str = "required") -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_tools_may_be_called_unless_the_choice_is_none() -> None:
    """Without a choice it is the model's."""
    for choice in (None, "auto"):
        ask = asked_tools([tool()], choice, None)
        assert ask is not None
        assert (ask.mode, ask.is_forced, ask.is_parallel) == ("auto", False, True)
    assert asked_tools([tool()], "none", None) is None
    assert asked_tools(None, None, None) is None
    assert asked_tools([], "none", False) is None


def test_a_call_is_forced_of_any_or_of_the_named_tool() -> None:
    """The named one is called once."""
    any_of = asked_tools([tool("a"), tool("b")], "required", False)
    assert asked_tools([tool("a"), tool("b")], "any", False) == any_of  # Mistral's name.
    named = asked_tools([tool("a"), tool("b")], {"type": "function", "function": {"name": "b"}}, None)

    assert any_of is not None
    assert named is not None
    assert (any_of.mode, [each.name for each in any_of.tools], any_of.is_parallel) == ("required", ["a", "b"], False)
    assert (named.mode, sorted({each.name for each in named.tools}), named.is_parallel) == ("named", ["b"], False)


def test_allowed_tools_are_the_only_ones() -> None:
    """In either mode."""
    ask = asked_tools([tool("a"), tool("b"), tool("c")], allowed("c", "a", mode="auto"), None)

    assert ask is not None
    assert (ask.mode, [each.name for each in ask.tools]) == ("auto", ["c", "a"])


def test_a_tool_without_parameters_takes_any_object() -> None:
    """And a schema without a type is one of an object."""
    ask = asked_tools(
        [tool("a"), tool("b", parameters={"properties": {}}), tool("c", parameters={}, strict=True)], None, None
    )

    assert ask is not None
    assert [each.parameters["type"] for each in ask.tools] == ["object"] * 3
    assert [each.is_strict for each in ask.tools] == [False, False, True]


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        (None, "required", "tool_choice"),
        ([], {"type": "function", "function": {"name": "f"}}, "tool_choice"),
        ([tool()], "some", "tool_choice"),
        ([tool()], {"type": "function"}, "tool_choice"),
        ([tool()], {"type": "function", "function": {"name": "g"}}, "tool_choice.function.name"),
        ([tool()], allowed("g"), "tool_choice.allowed_tools.tools"),
        ([tool()], allowed(), "tool_choice.allowed_tools.tools"),
        (
            [tool()],
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [1]}},
            "tool_choice.allowed_tools.tools",
        ),
        ([{"type": "custom"}], None, "tools[0]"),
        ([tool(), {"type": "function"}], "none", "tools[1]"),
        ([tool("")], None, "tools[0].function.name"),
        ([tool("a b")], None, "tools[0].function.name"),
        ([tool("a"), tool("a")], None, "tools"),
        ([tool(parameters=[])], None, "tools[0].function.parameters"),
        ([tool(parameters={"type": "string"})], None, "tools[0].function.parameters"),
        ([tool(strict="yes")], None, "tools[0].function.strict"),
        ([tool(str(number)) for number in range(MAX_TOOLS + 1)], None, "tools"),
    ],
)
def test_what_contradicts_itself_is_refused(tools: Any, choice: Any, param: str) -> None:
    """The error names the place."""
    with pytest.raises(InvalidRequest) as refusal:
        asked_tools(tools, choice, None)

    assert refusal.value.param == param


def test_tools_need_a_template_with_a_place_for_them() -> None:
    """Elsewhere the model would never see them."""
    check_rendered([tool()], {"tools"})
    check_rendered(None, set())
    with pytest.raises(InvalidRequest) as refusal:
        check_rendered([tool()], {"messages"})

    assert (refusal.value.param, refusal.value.code) == ("tools", "unsupported_parameter")
