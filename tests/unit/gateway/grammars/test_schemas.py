"""Schemas that llguidance would not keep to, and schemas as parts of other grammars."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.gateway.grammars.checking import check_lark
from services.gateway.grammars.schemas import json_rule, json_schema_grammar
from shared.errors import InvalidRequest
from shared.messages.requests import MAX_GRAMMAR_BYTES

NAMED = {"properties": {"minProperties": {"type": "integer"}, "nullable": {"enum": [{"nullable": True}]}}}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"items": {"additionalItems": False}}, "additionalItems"),
        ({"properties": {"a": {"divisibleBy": 3}}}, "divisibleBy"),
        ({"anyOf": [{}, {"disallow": "string"}]}, "disallow"),
        ({"$defs": {"a": {"extends": {}}}}, "extends"),
        ({"type": "string", "nullable": True}, "nullable"),
        ({"exclusiveMinimum": True, "minimum": 3}, "exclusiveMinimum"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"multipleOf": 1_000_003}, "multipleOf"),
        ({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}, "multipleOf"),
        ({"x-guidance": {"lenient": True}}, "x-guidance"),
        ([], "object"),
        (True, "object"),
        ("{", "JSON"),
        ({"description": "x" * MAX_GRAMMAR_BYTES}, "65536"),
        ('{"items":' * 5000 + "{}" + "}" * 5000, "J"),
        (json.loads('{"items":' * 200 + "{}" + "}" * 200), "100 levels"),
    ],
)
def test_what_would_be_ignored_or_take_too_long_is_refused(schema: Any, said: str) -> None:
    """The message names the keyword or the bound."""
    with pytest.raises(InvalidRequest) as refusal:
        json_schema_grammar(schema, param="field")

    assert said in refusal.value.message
    assert refusal.value.param == "field"


@pytest.mark.parametrize(
    "schema",
    [
        {"multipleOf": 0.01},
        {"anyOf": [{"multipleOf": 100}, {"multipleOf": 2.5}, {"multipleOf": 7}]},
        {"minProperties": 1},
        {"minProperties": 2, "required": ["a", "b"]},
        {"nullable": False, "additionalProperties": True, "items": False},
        {"enum": [{"minProperties": 9, "nullable": True}], "default": {"extends": 1}},
        NAMED,
    ],
)
def test_what_is_kept_to_is_accepted(schema: dict[str, Any]) -> None:
    """Keywords within their bounds, and names and values that only look like keywords; the order of keys stays."""
    grammar = json_schema_grammar(schema, param="field")

    assert grammar.kind == "json_schema"
    assert list(json.loads(grammar.text)) == list(schema)
    assert json_schema_grammar(json.dumps(schema), param="field") == grammar


def test_schemas_inside_lark_are_checked() -> None:
    """A Lark grammar's own JSON schemas are held to the same."""
    check_lark(f"start: a b\na: {json_rule({'type': 'integer'}, param='x')}\nb: %json {{}}")
    with pytest.raises(InvalidRequest, match="multipleOf"):
        check_lark('start: %json {}\nb: %json\n {"multipleOf": 1000003}')
    with pytest.raises(InvalidRequest, match="no JSON"):
        check_lark("start: %json {")
