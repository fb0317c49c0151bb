"""Schemas that llguidance would not keep to, and schemas as parts of other grammars."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.gateway.grammars.checking import GrammarChecks, check_lark
from services.gateway.grammars.requested import Asked, written_grammar
from services.gateway.grammars.schemas import json_rule, json_schema_grammar
from shared.errors import InvalidRequest
from shared.messages.requests import MAX_GRAMMAR_BYTES
from tests.unit.gateway.running_gateway import FACTS, tokenizer

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


CHAIN: dict[str, Any] = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(1500)}
NODE = {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}}, "required": ["c"]}
NEXT = {"type": "array", "minItems": 1, "items": {"anyOf": [{"$ref": "#/$defs/n"}]}}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"enum": [-(2**63)]}, "enum"),
        ({"items": {"const": {"a": [2**53 + 1]}}}, "const"),
        ({"const": -(2.0**60)}, "const"),
        ({"enum": [123456789.12345679]}, "enum"),
        ({"const": 1e-30}, "const"),
        ({"type": "integer", "minimum": -(2**63), "maximum": -(2**63) + 5}, "minimum"),
        ({"minimum": -1e300, "maximum": -1e200}, "minimum"),
        ({"type": "integer", "exclusiveMinimum": 2**53 + 2}, "exclusiveMinimum"),
        ({"exclusiveMaximum": 2**60}, "exclusiveMaximum"),
        ({"type": "number", "maximum": 2**63 - 1}, "maximum"),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, "minimum"),
        ({"minimum": 0.30000000000000004}, "minimum"),
        ({"const": "a\u0001"}, "U+0001"),
        ({"enum": ["c", {"k": ["\u007f"]}]}, "U+007F"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "exclusiveMinimum"),
        ({"type": "number", "exclusiveMinimum": 3, "exclusiveMaximum": 3.5}, "exclusiveMinimum"),
        ({"minimum": -8.9, "exclusiveMaximum": -8}, "exclusiveMaximum"),
        ({"allOf": [{"exclusiveMinimum": 0.0}, {"type": "number", "maximum": 0.5}]}, "exclusiveMinimum"),
        ({"exclusiveMinimum": 0, "$ref": "#/$defs/a", "$defs": {"a": {"maximum": 0.5}}}, "exclusiveMinimum"),
        ({"$ref": "#/c/s/0", "c": {"s": [{"enum": [-(2**63)]}]}}, "enum"),
        ({"$ref": "#/c%20c/a~1b", "c c": {"a/b": {"enum": [-(2**63)]}}}, "enum"),
        ({"$ref": "#named", "not": {"$anchor": "named", "enum": [-(2**63)]}}, "#named"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$id": "http://a/b", "$ref": "#/c", "c": {"enum": [1]}}}}, "$id"),
        ({"$ref": "#/$defs/none", "$defs": {}}, "#/$defs/none"),
        ({"$ref": "#/$defs/d0", "$defs": {**CHAIN, "d1500": {"type": "null"}}}, "$ref"),
        ({"$ref": "#/$defs/n", "$defs": {"n": NODE}}, "endless"),
        ({"properties": {"a": {"type": "null"}, "b": {"$ref": "#/$defs/n"}}, "$defs": {"n": NODE}}, "endless"),
        ({"type": "array", "items": {"$ref": "#/$defs/n"}, "$defs": {"n": NEXT}}, "endless"),
        ({"allOf": [{"$ref": "#"}]}, "endless"),
    ],
)
def test_what_would_not_be_kept_to_is_refused_by_name(schema: dict[str, Any], said: str) -> None:
    """Numbers, characters and references with which llguidance ends the process, or lets wrong answers through."""
    with pytest.raises(InvalidRequest) as refusal:
        json_schema_grammar(schema, param="field")

    assert said in refusal.value.message
    assert (refusal.value.param, refusal.value.code) == ("field", "unsupported_schema")


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [2**53, -(2**53), 0.1, 1e-22, 123456.789, 1.5, True, None, "\b\t\n\f\r é"]},
        {"const": {"a\u0001": 1}},
        {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
        {"type": ["integer", "null"], "maximum": 2**63 - 1},
        {"type": "integer", "exclusiveMinimum": 0, "maximum": 1.5},
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"items": {"exclusiveMinimum": 0}, "properties": {"a": {"maximum": 0.5}}},
        {"properties": {"a": {"$id": "#/properties/a"}}},
        {"$ref": "#/$defs/n", "$defs": {"n": {**NODE, "required": []}}},
        {"$ref": "#/$defs/n", "$defs": {"n": {"anyOf": [NODE, {"type": "null"}]}}},
        {"$ref": "#/$defs/n", "$defs": {"n": {**NEXT, "minItems": 0}}},
        {"default": {"enum": [2**60]}, "examples": ["\u0001"]},
    ],
)
async def test_what_is_kept_to_beside_it_compiles(schema: dict[str, Any]) -> None:
    """The bounds themselves, and what only looks alike."""
    checks = GrammarChecks(tokenizer().definition, FACTS.vocab_size, FACTS.eos_token_ids)
    made = await checks.made(Asked("field", lambda: json_schema_grammar(schema, param="field")))
    checks.close()

    assert made is not None
    assert json.loads(made.text) == schema


def test_schemas_inside_lark_are_checked() -> None:
    """A Lark grammar's own JSON schemas are held to the same."""
    check_lark(f"start: a b\na: {json_rule({'type': 'integer'}, param='x')}\nb: %json {{}}")
    with pytest.raises(InvalidRequest, match="multipleOf"):
        check_lark('start: %json {}\nb: %json\n {"multipleOf": 1000003}')
    with pytest.raises(InvalidRequest, match="enum"):
        check_lark('start: "a" %json {"enum": [-9223372036854775807]}')
    with pytest.raises(InvalidRequest, match="no JSON"):
        check_lark("start: %json {")


@pytest.mark.parametrize(
    "schema",
    [
        r'{"allOf": [{"properties": {"a": {"title": "\ud800"}}}, {}]}',
        r'{"pattern": "[^a]\ud800"}',
        '{"maximum": 1e400, "exclusiveMinimum": 0}',
        '{"minimum": NaN}',
        '{"type": "array", "minItems": 1e400, "items": {}}',
        '{"type": "array", "minItems": NaN, "items": {}}',
        '{"type": "object", "required": [[1]], "properties": {}}',
        '{"enum": 5, "type": [[]], "anyOf": [1], "$ref": 7}',
    ],
)
async def test_schemas_inside_lark_that_are_no_schemas_are_refused(schema: str) -> None:
    """Python reads more than JSON has."""
    checks = GrammarChecks(tokenizer().definition, FACTS.vocab_size, FACTS.eos_token_ids)
    with pytest.raises(InvalidRequest):
        await checks.made(Asked("x", lambda: written_grammar(f"start: %json {schema}", param="x")))
    checks.close()
