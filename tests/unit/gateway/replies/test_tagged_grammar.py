"""Grammars of arguments in tags: what they let through is read as arguments that are valid, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from services.gateway.assembly import Delta
from services.gateway.replies.parts import CallArguments
from shared.errors import InvalidRequest
from tests.unit.gateway.replies import families
from tests.unit.gateway.replies.test_reply_grammar import Cell, ask

DEFS = {
    "$defs": {
        "point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
        "short": {"type": "string", "maxLength": 3},
        "shorter": {"$ref": "#/$defs/short", "minLength": 2, "maxLength": 2},
    }
}


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    made = Cell(tmp_path_factory.mktemp("tagged"), families.SPECIALS)
    yield made
    made.tokenizer.close()


def tool(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]


def of(schema: dict[str, Any]) -> dict[str, Any]:
    """An object with a required ``k`` of this schema."""
    return {"type": "object", "properties": {"k": schema}, "required": ["k"], "additionalProperties": False, **DEFS}


def said(text: str, key: str = "k") -> str:
    return f"<tool_call>\n<function=f>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n</tool_call>"


def arguments(cell: Cell, schema: dict[str, Any], text: str) -> Any:
    """What a reader makes of the one call in ``text``."""
    reply = ask(cell, "qwen3_coder", tools=tool(schema)).new_reply("r")
    parts = reply.read(Delta(text=text, finish="stop"))
    return json.loads("".join(part.text for part in parts if isinstance(part, CallArguments)))


CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"type": "string"}, ["", "a", "<b>\n\n", '"', "</parameter", "1"], []),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "a\nb", "abc"], ["", "a", "abcd", "ab\n\n"]),
    ({"type": "string", "pattern": "^[a-c/]+$"}, ["abc/a"], ["", "x", "a\n", "ax"]),
    ({"type": "string", "pattern": "b+"}, ["b", "abba"], ["", "x"]),
    ({"type": "string", "format": "date"}, ["2026-11-28"], ["2026-11-31", "today"]),
    ({"type": "string", "format": "date-time"}, ["2026-11-28T01:02:03Z"], ["2026-11-28"]),
    ({"enum": ["one", "two\n", 3, None]}, ["one", "two\n", "3", "null"], ["", "two", "4"]),
    ({"const": "x"}, ["x"], ["", "y"]),
    ({"type": "integer", "enum": [1, 2], "title": "t"}, ["1"], ["3", "x"]),
    ({"type": "integer", "minimum": 3, "maximum": 12}, ["3", "12"], ["2", "x", "3.5", '"3"', ""]),
    ({"type": "boolean"}, ["true", "false"], ["True", "1"]),
    ({"type": ["number", "null"]}, ["1.5", "null"], ["x", '"x"']),
    ({"type": "array", "items": {"type": "string"}}, ["[]", '["</parameter>"]'], ["[1]", "x"]),
    ({"$ref": "#/$defs/point"}, ['{"x": 1}'], ["{}", "x"]),
    ({"allOf": [{"$ref": "#/$defs/point"}]}, ['{"x": 1}'], ["{}"]),
    ({"$ref": "#/$defs/short", "title": "t"}, ["abc"], ["abcd"]),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["null", "x", "", "1"], []),
    ({"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]}, ["null", "x"], ["xyz"]),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}], "default": 1}, ["1", "x"], []),
    ({"type": ["string", "null"], "description": "d"}, ["null", "x"], []),
    ({}, ["1", "x", '{"a": 1}', '{"a'], []),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), CASES)
def test_what_is_let_through_is_valid(schema: dict[str, Any], good: list[str], bad: list[str], cell: Cell) -> None:
    """A parameter has the type that its schema says, whatever its text looks like."""
    whole = of(schema)
    grammar = ask(cell, "qwen3_coder", tools=tool(whole), tool_choice="required").grammar

    for text in good:
        assert cell.lets_through(grammar, said(text)), text
        Draft202012Validator(whole).validate(arguments(cell, whole, said(text)))
    assert [text for text in bad if cell.lets_through(grammar, said(text))] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "format": "hostname"},
        {"type": ["string", "integer"], "minimum": 3},
        {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]},
        {"enum": ["1", 2]},
        {"enum": ["</parameter>"]},
        {"type": "string", "pattern": "^a|b$"},
        {"type": "string", "contentEncoding": "base64"},
        {"type": "integer", "enum": [1, 2, 3], "minimum": 2},
        {"type": "string", "enum": ["a", "bb"], "minLength": 2},
        {"const": "x", "enum": ["y"]},
        {"type": "integer", "const": "x"},
        {"type": "string", "enum": ["x", 1]},
        {"type": 5},
        {"enum": 5},
        {"type": "string", "pattern": 5},
        {"type": "string", "format": []},
        {"type": "string", "minLength": "1}|.{2"},
        {"type": "object", "required": [5]},
        {"anyOf": 5},
        {"allOf": {"a": 5}},
        {"$ref": "#/$defs/point", "maxProperties": 1},
        {"$ref": "#/$defs/short", "pattern": "^a"},
        {"$ref": "#/$defs/shorter"},
    ],
)
def test_what_a_text_cannot_be_held_to_is_refused(schema: dict[str, Any], cell: Cell) -> None:
    """With the place of the tool."""
    with pytest.raises(InvalidRequest) as refusal:
        ask(cell, "qwen3_coder", tools=tool(of(schema)), tool_choice="required")

    assert refusal.value.param == "tools[0].function.parameters"


def test_optional_parameters_may_be_left_out_and_others_may_not_come(cell: Cell) -> None:
    """Declared ones keep their order; an object that declares none takes any."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["b"]}
    grammar = ask(cell, "qwen3_coder", tools=tool(schema)).grammar
    free = ask(cell, "qwen3_coder", tools=tool({"type": "object"}), tool_choice="required").grammar
    numbers = {"type": "object", "additionalProperties": {"type": "number"}}
    typed = ask(cell, "qwen3_coder", tools=tool(numbers), tool_choice="required").grammar
    empty = "<tool_call>\n<function=f>\n</function>\n</tool_call>"
    both = said("x", "b").replace("<parameter=b>", "<parameter=a>\n1\n</parameter>\n<parameter=b>")

    assert cell.lets_through(grammar, both)
    assert cell.lets_through(grammar, said("x", "b"))
    assert not cell.lets_through(grammar, said("1", "a"))
    assert not cell.lets_through(grammar, said("x", "c"))
    assert not cell.lets_through(grammar, empty)
    assert cell.lets_through(free, both)
    assert cell.lets_through(free, empty)
    assert cell.lets_through(typed, said("1", "c"))
    assert not cell.lets_through(typed, said("x", "c"))
    assert arguments(cell, schema, both) == {"a": 1, "b": "x"}


def test_a_call_outside_of_the_markers_is_not_let_through_where_calls_are_bound(cell: Cell) -> None:
    """It would be read as a call, though nothing would bind it."""
    grammar = ask(cell, "qwen3_coder", tools=tool(of({"type": "integer"}))).grammar

    assert cell.lets_through(grammar, "So be it: <function and <parameter=k>.")
    assert cell.lets_through(grammar, "I see.\n" + said("1"))
    assert not cell.lets_through(grammar, "I see. <function=f></function>")
