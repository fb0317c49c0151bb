"""JSON schemas as grammars. Schemas that llguidance would partly ignore, or compile for too long, are refused here."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, Final

import msgspec

from services.gateway.grammars.conjunctions import MAX_CONJUNCTS, schema_conjuncts
from services.gateway.grammars.patterns import kept_pattern
from services.gateway.grammars.references import is_endless, schema_parts
from services.gateway.grammars.values import narrow_fault, value_faults
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

_KINDS: Final[Mapping[str, type | tuple[type, ...]]] = {
    "type": (str, list),
    "properties": dict,
    "patternProperties": dict,
    "required": list,
    "enum": list,
    "allOf": list,
    "anyOf": list,
    "oneOf": list,
    "pattern": str,
    "format": str,
    "minLength": (int, float),
    "maxLength": (int, float),
}
_SCHEMA_IN_LARK: Final = "%json"


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


def check_schema(schema: object, *, param: str) -> dict[str, Any]:
    """Return the schema if llguidance ignores nothing in it and can compile it. Raises InvalidRequest."""
    if not isinstance(schema, dict):
        raise InvalidRequest("a JSON schema must be an object", param=param)
    if _nesting(schema) > MAX_NESTING:
        raise InvalidRequest(f"a JSON schema may have at most {MAX_NESTING} levels", param=param)
    parts, multiple = schema_parts(schema, param=param), 1
    _check_whole(schema, parts, param)
    for part in parts:
        for fault in _faults(part):
            raise _refusal(fault, param)
        _keep_patterns(part, param)
        if (step := _step(part)) is not None:
            multiple = math.lcm(multiple, step)
            if multiple > MAX_MULTIPLE:
                raise _refusal(f"multipleOf: the least common multiple is above {MAX_MULTIPLE}", param)
    if (narrow := narrow_fault(parts)) is not None:
        raise _refusal(narrow, param)
    return schema


def lark_with_kept_schemas(lark: str, *, param: str) -> str:
    """Return a Lark grammar in which the patterns of the schemas behind ``%json`` have the form that can be kept to.

    Raises InvalidRequest, as :func:`check_schema` does.
    """
    kept, place = list[str](), 0
    for start, end, schema in schemas_in_lark(lark, param=param):
        if start >= place and (changed := _with_kept_patterns(schema, param)) != schema:
            kept += [lark[place:start], json.dumps(changed).replace("%", "\\u0025")]
            place = end
    return "".join(kept) + lark[place:]


def schemas_in_lark(lark: str, *, param: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield the beginning, the end and the value of each schema behind ``%json``, checked. Raises InvalidRequest."""
    decoder, place = json.JSONDecoder(), 0
    while (place := lark.find(_SCHEMA_IN_LARK, place)) >= 0:
        place += len(_SCHEMA_IN_LARK)
        start = place + len(lark[place:]) - len(lark[place:].lstrip())
        try:
            schema, end = decoder.raw_decode(lark, start)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"%json is followed by no JSON: {error}", param=param) from error
        if isinstance(schema, dict):
            check_schema(schema, param=param)
            yield start, end, schema


def _check_whole(schema: dict[str, Any], parts: list[dict[str, Any]], param: str) -> None:
    """Check how the parts of a schema apply and refer to one another. Raises InvalidRequest."""
    try:
        conjuncts = schema_conjuncts(schema, parts)
    except RecursionError as error:
        raise _refusal("$ref: too many references lead from one to the next", param) from error
    if conjuncts > MAX_CONJUNCTS:
        raise _refusal(f"at most {MAX_CONJUNCTS} patterns, formats and lengths may apply to a string at once", param)
    if is_endless(schema, parts, param=param):
        raise _refusal("a schema that requires itself has only endless values", param)


def _with_kept_patterns(schema: dict[str, Any], param: str) -> dict[str, Any]:
    """Return a copy of a checked schema whose patterns have the form that can be kept to."""
    kept = copy.deepcopy(schema)
    for part in schema_parts(kept, param=param):
        part |= _keep_patterns(part, param)
    return kept


def _keep_patterns(part: Mapping[str, Any], param: str) -> dict[str, Any]:
    """Return the keywords of one schema that hold patterns, in the form that can be kept to. Raises InvalidRequest."""
    kept: dict[str, Any] = {}
    if isinstance(pattern := part.get("pattern"), str):
        kept["pattern"] = kept_pattern(pattern, param=param)
    if isinstance(named := part.get("patternProperties"), dict):
        kept["patternProperties"] = {kept_pattern(name, param=param): inner for name, inner in named.items()}
        if len(kept["patternProperties"]) < len(named):
            raise _refusal("patternProperties: two patterns differ only in U+0000", param)
    return kept


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
        raise _refusal("x-guidance cannot be set here", param)
    text = msgspec.json.encode(_with_kept_patterns(checked, param))
    if len(text) > MAX_GRAMMAR_BYTES:
        raise _too_long(param)
    return text.decode()


def _refusal(fault: str, param: str) -> InvalidRequest:
    return InvalidRequest(fault, param=param, code="unsupported_schema")


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


def _faults(part: Mapping[str, Any]) -> Iterator[str]:
    for name, kind in _KINDS.items():
        if name in part and not isinstance(part[name], kind):
            yield f"{name} has a value of another kind"
    for name in ("type", "required"):
        if isinstance(part.get(name), list) and not all(isinstance(each, str) for each in part[name]):
            yield f"{name} must list strings"
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
    yield from value_faults(part)


def _step(part: Mapping[str, Any]) -> int | None:
    """Return how far an automaton counts for ``multipleOf``, or None without a valid one."""
    multiple = part.get("multipleOf")
    if not isinstance(multiple, int | float) or isinstance(multiple, bool) or not 0 < multiple < math.inf:
        return None  # llguidance reports what is wrong with it.
    # The numerator in lowest terms: 0.01 gives 1, 2.5 gives 5 and 1000 gives 1000.
    return Fraction(str(multiple)).numerator
