"""What one string would have to keep to at once."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.grammars.checking import check_lark
from services.gateway.grammars.conjunctions import MAX_CONJUNCTS
from services.gateway.grammars.schemas import json_schema_grammar
from shared.errors import InvalidRequest

MANY = [{"type": "string", "pattern": f"(a|b)*a(a|b){{{number}}}"} for number in range(MAX_CONJUNCTS + 1)]
HALVES: dict[str, Any] = {"a": {"allOf": MANY[:5]}, "b": {"allOf": MANY[5:], "maxLength": 3}}


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": MANY},
        {"items": {"allOf": [{"allOf": MANY[:4]}, {"anyOf": [{"allOf": MANY[4:]}, {"type": "null"}]}]}},
        {"allOf": [{"properties": {"a": one}} for one in MANY]},
        {"allOf": [{"items": one} for one in MANY]},
        {"$ref": "#/$defs/a", "allOf": [{"$ref": "#/$defs/b"}], "$defs": HALVES},
        {"$ref": "#/$defs/c", "$defs": {**HALVES, "c": {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}}},
        {"properties": {"a": {"allOf": MANY[:5]}}, "patternProperties": {"^a$": {"allOf": MANY[5:]}}},
        {"allOf": [{"$ref": "#/named/0"}], "named": [{"allOf": MANY}]},
    ],
)
def test_too_many_patterns_of_one_string_are_refused(schema: dict[str, Any]) -> None:
    """Wherever they come from: compiling them would take minutes."""
    with pytest.raises(InvalidRequest, match="at once"):
        json_schema_grammar(schema, param="x")


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": MANY[:MAX_CONJUNCTS]},
        {"anyOf": MANY},
        {"properties": {f"p{number}": one for number, one in enumerate(MANY)}, "allOf": [{}, {"type": "object"}]},
        {"properties": {"a": {"anyOf": MANY}, "b": {"properties": {"a": {"anyOf": MANY}}}}},
        {"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"s": MANY[0], "n": {"$ref": "#/$defs/n"}}}}},
    ],
)
def test_patterns_of_different_strings_are_no_matter(schema: dict[str, Any]) -> None:
    """However many a schema has."""
    assert json_schema_grammar(schema, param="x").kind == "json_schema"


def test_intersections_in_lark_are_counted() -> None:
    """Outside of strings, regular expressions and comments, which may hold what they like."""
    check_lark('start: T\nT: /a&~b/ & "&~&~&~&~&~" & ~/x/ // ' + "&" * 20)
    with pytest.raises(InvalidRequest, match="& and ~"):
        check_lark("start: T\nT: " + " & ".join(["/a/"] * 10))
    with pytest.raises(InvalidRequest, match="& and ~"):
        check_lark('# "\nstart: T\nT: ' + " | ".join(["~/a/"] * 9) + '\n# "')
