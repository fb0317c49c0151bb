"""JSON schemas as grammars. Schemas that llguidance would partly ignore, or compile for too long, are refused here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, Final

import msgspec

from services.gateway.grammars.conjunctions import MAX_CONJUNCTS, schema_conjuncts
from shared.errors import InvalidRequest
from shared.grammars import JSON_OPTIONS
from shared.messages.requests import MAX_GRAMMAR_BYTES, Grammar

MAX_NESTING: Final = 100
"""Limit on a schema's levels of nesting. llguidance reads 128."""

MAX_MULTIPLE: Final = 10_000
"""Limit on the least common multiple of all ``multipleOf`` of a schema (of fractions, the numerators): an automaton
counts to it. 10,000 takes 50 ms and 1,000,000 takes 4 s.
"""

_IGNORED: Final = ("additionalItems", "divisibleBy", "disallow", "extends")
"""Keywords of old drafts that llguidance ignores."""

_SCHEMAS_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions")
_LISTS_OF_SCHEMAS: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMAS: Final = ("items", "additionalProperties")


def json_schema_grammar(schema: object, *, param: str) -> Grammar:
    """Return the grammar of answers that are valid under ``schema``, a JSON schema or its text.

    Raises InvalidRequest, which names ``param``, for an invalid schema, or one that cannot be enforced, as far as that
    shows without compiling.
    """
    return Grammar(kind="json_schema", text=_checked(schema, param))


def json_rule(schema: object, *, param: str) -> str:
    """Return a part of a Lark grammar: JSON valid under ``schema``, as in :func:`json_schema_grammar`.

    Raises InvalidRequest.
    """
    checked = msgspec.json.decode(_checked(schema, param))
    return f"%json {msgspec.json.encode({**checked, 'x-guidance': JSON_OPTIONS}).decode()}"


def check_schema(schema: object, *, param: str) -> Mapping[str, Any]:
    """Return the schema if llguidance ignores nothing in it and can compile it. Raises InvalidRequest."""
    if not isinstance(schema, dict):
        raise InvalidRequest("a JSON schema must be an object", param=param)
    if _nesting(schema) > MAX_NESTING:
        raise InvalidRequest(f"a JSON schema may have at most {MAX_NESTING} levels", param=param)
    parts, multiple = list(_parts(schema)), 1
    if schema_conjuncts(schema, parts) > MAX_CONJUNCTS:
        raise InvalidRequest(
            f"at most {MAX_CONJUNCTS} patterns, formats and lengths may apply to a string at once",
            param=param,
            code="unsupported_schema",
        )
    for part in parts:
        for fault in _faults(part):
            raise InvalidRequest(fault, param=param, code="unsupported_schema")
        if (step := _step(part)) is not None:
            multiple = math.lcm(multiple, step)
            if multiple > MAX_MULTIPLE:
                raise InvalidRequest(
                    f"multipleOf: the least common multiple is above {MAX_MULTIPLE}",
                    param=param,
                    code="unsupported_schema",
                )
    return schema


def _checked(schema: object, param: str) -> str:
    if isinstance(schema, str):
        if len(schema) > MAX_GRAMMAR_BYTES:
            raise _too_long(param)
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(f"the schema is no JSON: {error}", param=param) from error
    checked = check_schema(schema, param=param)
    if "x-guidance" in checked:
        raise InvalidRequest("x-guidance cannot be set here", param=param, code="unsupported_schema")
    text = msgspec.json.encode(checked)
    if len(text) > MAX_GRAMMAR_BYTES:
        raise _too_long(param)
    return text.decode()


def _too_long(param: str) -> InvalidRequest:
    return InvalidRequest(f"a JSON schema may have at most {MAX_GRAMMAR_BYTES} bytes", param=param)


def _nesting(value: object) -> int:
    """Return the levels of lists and objects, counted up to MAX_NESTING + 1."""
    level, here = 0, [value]
    while here and level <= MAX_NESTING:
        inside = [each for each in here if isinstance(each, dict | list)]
        here = [part for each in inside for part in (each.values() if isinstance(each, dict) else each)]
        level += bool(inside)
    return level


def _parts(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the schema and all schemas in it, but no values that only look like one, as in ``enum`` or ``default``."""
    waiting: list[object] = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        yield part
        for name in _SCHEMAS_BY_NAME:
            if isinstance(part.get(name), dict):
                waiting += part[name].values()
        for name in _LISTS_OF_SCHEMAS:
            if isinstance(part.get(name), list):
                waiting += part[name]
        waiting += [part[name] for name in _SCHEMAS if name in part]


def _faults(part: Mapping[str, Any]) -> Iterator[str]:
    for name in _IGNORED:
        if name in part:
            yield f"{name} is not supported"
    if part.get("nullable") is True:
        yield "nullable is not supported: give both types, as in {'type': ['string', 'null']}"
    for name in ("exclusiveMinimum", "exclusiveMaximum"):
        if isinstance(part.get(name), bool):
            yield f"{name} must be a number"
    least, required = part.get("minProperties"), part.get("required")
    if isinstance(least, int | float) and least > max(
        1, len(set(map(str, required))) if isinstance(required, list) else 0
    ):
        yield "minProperties is supported up to 1, or up to the number of required keys: a key may occur twice"


def _step(part: Mapping[str, Any]) -> int | None:
    """Return how far an automaton counts for ``multipleOf``, or None without a valid one."""
    multiple = part.get("multipleOf")
    if not isinstance(multiple, int | float) or isinstance(multiple, bool) or not 0 < multiple < math.inf:
        return None  # llguidance reports what is wrong with it.
    # The numerator in lowest terms: 0.01 gives 1, 2.5 gives 5 and 1000 gives 1000.
    return Fraction(str(multiple)).numerator
