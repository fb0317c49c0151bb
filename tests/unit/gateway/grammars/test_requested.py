"""From fields to grammars."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from services.gateway.grammars.requested import asked_grammar, choice_grammar, written_grammar
from services.gateway.openai_schema.completions import CompletionRequest
from shared.errors import InvalidRequest
from shared.messages.requests import Grammar

SCHEMA = {"type": "integer"}
NAMED = {"name": "n", "schema": SCHEMA, "strict": True}


def grammar_of(**fields: Any) -> Grammar | None:
    request = msgspec.convert({"prompt": "x", **fields}, CompletionRequest)
    asked = asked_grammar(request, request.response_format)
    return None if asked is None else asked.make()


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type":"object"}'),
        ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, "json_schema", '{"type":"integer"}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "json_schema",
            '{"type":"object"}',
        ),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", '{"type":"integer"}'),
        ({"structured_outputs": {"json": '{"type": "integer"}'}}, "json_schema", '{"type":"integer"}'),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type":"object"}'),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a", "b.c"]}}, "regex", r"(?:a)|(?:b\.c)"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "lark", 'start: "a"'),
        ({"guided_json": SCHEMA}, "json_schema", '{"type":"integer"}'),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a"]}, "regex", "(?:a)"),
        ({"guided_json": SCHEMA, "response_format": {"type": "text"}}, "json_schema", '{"type":"integer"}'),
    ],
)
def test_each_field_is_a_grammar(fields: dict[str, Any], kind: str, text: str) -> None:
    """OpenAI's and vLLM's fields ask for the same grammars."""
    grammar = grammar_of(**fields)

    assert grammar is not None
    assert (grammar.kind, grammar.text) == (kind, text)


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"guided_json": None}])
def test_without_a_field_any_text_will_do(fields: dict[str, Any]) -> None:
    """No grammar, and nothing is compiled."""
    assert grammar_of(**fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"json": SCHEMA, "choice": ["a"]}}, "structured_outputs.choice"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.name"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": 1}}}, None),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": 1}}}, None),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": {}, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"guided_grammar": "root = what"}, "guided_grammar"),
        ({"guided_grammar": "root ::= " + "(" * 9000}, "guided_grammar"),
    ],
)
def test_contradictions_and_what_is_not_served(fields: dict[str, Any], param: str | None) -> None:
    """Two grammars, a grammar that must not end, and kinds that are not served are refused by name."""
    with pytest.raises(InvalidRequest) as refusal:
        grammar_of(**fields)

    assert param is None or refusal.value.param == param


def test_choices_are_taken_literally() -> None:
    """Characters that mean something in a regular expression mean themselves."""
    choices = ["a.b", "(x)", "[1-2]", "{3}", "\\d", "a|b", "^$", "tab\tline\n", "#&~", "日本", ""]
    pattern = choice_grammar(choices).text

    assert all(re.fullmatch(pattern, choice) for choice in choices)
    assert not any(re.fullmatch(pattern, other) for other in ("axb", "x", "1", "5", "a"))


def test_gbnf_becomes_lark() -> None:
    """``root`` and its rules are translated."""
    lark = written_grammar('root ::= "a" item{1,2}\nitem ::= [0-9]+', param="x").text

    assert "start:" in lark
    assert "::=" not in lark
