"""Patterns against JSON texts, by the gateway's grammar as a worker compiles it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from services.gateway.grammars.requested import written_grammar
from services.gateway.grammars.schemas import json_rule, json_schema_grammar
from shared.errors import InvalidRequest
from shared.grammars import compile_grammar, token_table
from shared.messages.requests import Grammar

TOKENS = token_table((Path(__file__).parents[4] / "models/thermocline-mha/tokenizer.json").read_text(), 2560, (2,))
SAID = ('"', "\\", "\n", "\t", "\b", "/", "-", "]", "^", "a", "Z", "5", "!", " ", "é", "&")


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether ``text`` is a whole answer."""
    matcher, tokens = compile_grammar(TOKENS, grammar), TOKENS.tokenize_str(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def test_characters_of_gbnf_may_be_given_by_number() -> None:
    """With as many digits as the syntax has, in literals and classes; in Lark, too."""
    grammar = written_grammar(
        'root ::= "\\x41\\u005a" [\\u00e9] "\\U0001F600\\u0022" "\\\\u00e9" [\\u005d-\\u005e]', param="x"
    )

    assert accepts(grammar, 'AZé😀"\\u00e9^')
    assert accepts(grammar, 'AZé😀"\\u00e9]')
    assert accepts(written_grammar('start: "\\u00e9" /\\u00e9/', param="x"), "éé")
    with pytest.raises(InvalidRequest, match="GBNF"):
        written_grammar('root ::= "\\u00g9"', param="x")


def string(pattern: str) -> Grammar:
    return json_schema_grammar({"type": "string", "pattern": pattern}, param="x")


@pytest.mark.parametrize(
    "some",
    [
        r'[^"]',
        r'[^"\\]',
        r"[^\\]",
        r'[^<>"]',
        r"[^ -~]",
        r'[^\w"]',
        r'[^-"]',
        r'[^]"]',
        r'[^\]"]',
        r'[^^"]',
        r'[^"-]',
        r"[^\x00-\x1f]",
        r"[\x00-\x1f]",
        r"[\x00-!]",
        "[\0-\x1f]",
        r"[\u0000-\u0021a]",
        r"[]-a\x00-\x1f]",
        r"[\s\S]",
        r"\W",
        r"\[\^a?",
        r".",
    ],
)
def test_a_class_matches_what_it_says(some: str) -> None:
    """Quotes and backslashes among others, which stand in JSON as escapes; negated or not."""
    pattern = f"^x{some}$"

    grammar = string(pattern)

    let_through = [text for text in SAID if accepts(grammar, json.dumps(f"x{text}", ensure_ascii=False))]
    assert let_through == [text for text in SAID if re.search(pattern, f"x{text}", re.ASCII)]


@pytest.mark.parametrize(
    "pattern",
    [
        r"^a\x01b$",
        "^a\x01b$",
        r"^\u{1F}$",
        r"^\U0000007f$",
        r"^\v|\a$",
        r"[\x7f]",
        r"[a\x00]",
        r"[\x00-\x01]",
        r"\p{Cc}",
        r"[\P{P}]",
        r"\pC",
        r"\p{gc=Control}",
        r"\p{^P}",
        r"[[:cntrl:]]",
        r"[^a&&b]",
        r"[\x01-\x7f--a]",
        r"(?ix)a#[",
    ],
)
def test_what_cannot_be_spelt_or_understood_is_refused(pattern: str) -> None:
    """Characters that no escape spells, and classes of classes; in names of properties, too."""
    schemas: list[dict[str, Any]] = [{"items": {"pattern": pattern}}, {"patternProperties": {pattern: {}}}]
    for schema in schemas:
        with pytest.raises(InvalidRequest, match="pattern") as refusal:
            json_schema_grammar(schema, param="x")

        assert (refusal.value.param, refusal.value.code) == ("x", "unsupported_schema")


@pytest.mark.parametrize(
    "pattern", [r"^\p{L}+$", r"^\p{Script=Cyrillic}\PL?$", r"\\x01", r"[\[\]]", "(?i)a", "(?<x>a)"]
)
def test_what_only_looks_like_it_is_accepted(pattern: str) -> None:
    """As it was written."""
    assert json.loads(string(pattern).text)["pattern"] == pattern


def test_patterns_are_changed_wherever_a_schema_has_them_and_once() -> None:
    """In values they stay; the change reaches the worker in other grammars, too."""
    inner: dict[str, Any] = {"pattern": "[^a]"}
    schema = {"patternProperties": {"[^b]": inner}, "$ref": "#/c", "c": inner, "const": {"pattern": "[^a]"}}
    changed = {"pattern": r"[^\x00a]"}
    kept = {"patternProperties": {r"[^\x00b]": changed}, "$ref": "#/c", "c": changed, "const": {"pattern": "[^a]"}}

    text = json_schema_grammar(schema, param="x").text
    assert json.loads(text) == kept
    assert json_schema_grammar(text, param="x").text == text
    assert json.loads(json_rule(schema, param="x").removeprefix("%json"))["c"] == changed


def test_patterns_inside_lark_are_changed() -> None:
    """The rest of the grammar stays as it was written."""
    asked = 'start: "a" %json {"type": "string", "pattern": "^[^%\\"]$"} | T\nT: /[^a]/ # %json {"type" : "null"}'
    grammar = written_grammar(asked, param="x")

    assert not accepts(grammar, r'a"\""')
    assert accepts(grammar, 'a"b"')
    assert accepts(grammar, "b")
    assert grammar.text.startswith('start: "a" %json {')
    assert grammar.text.endswith('} | T\nT: /[^a]/ # %json {"type" : "null"}')
    with pytest.raises(InvalidRequest, match="enum") as refusal:
        written_grammar('start: %json {"enum": [-9223372036854775807]}', param="x")
    assert (refusal.value.param, refusal.value.code) == ("x", "unsupported_schema")
