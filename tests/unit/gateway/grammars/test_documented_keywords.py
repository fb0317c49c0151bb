"""The page on structured output against what is done."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from services.gateway.grammars.checking import GrammarChecks
from services.gateway.grammars.requested import Asked
from services.gateway.grammars.schemas import json_schema_grammar
from shared.errors import InvalidRequest
from tests.unit.gateway.running_gateway import FACTS, tokenizer

PAGE = (Path(__file__).parents[4] / "docs/how-to/structured-output.md").read_text(encoding="utf-8")
VALUES: dict[str, Any] = {
    "type": "string",
    "enum": [1],
    "const": 1,
    "properties": {"a": {}},
    "required": ["a"],
    "additionalProperties": False,
    "patternProperties": {"^a$": {}},
    "items": {"type": "null"},
    "prefixItems": [{}],
    "minItems": 1,
    "maxItems": 2,
    "minLength": 1,
    "maxLength": 2,
    "pattern": "^a$",
    "minimum": 1,
    "maximum": 2,
    "exclusiveMinimum": 1,
    "exclusiveMaximum": 2,
    "multipleOf": 3,
    "anyOf": [{}],
    "allOf": [{}],
    "oneOf": [{"type": "null"}, {"const": 1}],
    "$ref": "#",
    "$defs": {"a": {}},
    "definitions": {"a": {}},
    "not": {},
    "if": {},
    "then": {},
    "else": {},
    "uniqueItems": True,
    "contains": {},
    "minContains": 1,
    "maxContains": 1,
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {},
    "dependencies": {},
    "propertyNames": {},
    "unevaluatedItems": False,
    "unevaluatedProperties": False,
    "$dynamicRef": "#a",
    "additionalItems": False,
    "nullable": True,
    "x-guidance": {},
}


def named(row: str) -> list[str]:
    """What a row of the page's table of keywords names."""
    (line,) = re.findall(rf"^\| {row} \| (.*) \|$", PAGE, re.MULTILINE)
    return re.findall(r"`([^`]+)`", line)


async def refusal(schema: dict[str, Any]) -> str | None:
    """Why a schema is refused."""
    checks = GrammarChecks(tokenizer().definition, FACTS.vocab_size, FACTS.eos_token_ids)
    try:
        await checks.made(Asked("x", lambda: json_schema_grammar(schema, param="x")))
    except InvalidRequest as error:
        return error.message
    finally:
        checks.close()
    return None


@pytest.mark.parametrize("keyword", [name for name in named("enforced") if name != "$ref"])
async def test_what_the_page_says_is_kept_to_compiles(keyword: str) -> None:
    """Each keyword alone is a schema that is accepted."""
    assert await refusal({keyword: VALUES[keyword]}) is None


@pytest.mark.parametrize("keyword", named("refused"))
async def test_what_the_page_says_is_refused_is_refused(keyword: str) -> None:
    """Each keyword is named in the message, or what it is about."""
    message = await refusal({"type": "object", keyword: VALUES[keyword]})

    assert message is not None
    assert keyword in message


@pytest.mark.parametrize("form", named("`format`"))
async def test_formats_of_the_page_compile(form: str) -> None:
    """Each format is one that strings are held to."""
    assert await refusal({"type": "string", "format": form}) is None
