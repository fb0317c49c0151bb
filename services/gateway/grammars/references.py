"""The schemas that a schema consists of: in its keywords, and behind its references."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote

from shared.errors import InvalidRequest

_SCHEMAS_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions")
_LISTS_OF_SCHEMAS: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SCHEMAS: Final = ("items", "additionalProperties")

_POINTER: Final = re.compile(r"#(?:/(?:[^%]|%(?!2[5Ff]|7[Ee]))*)?", re.DOTALL)
"""A JSON pointer in a fragment, whose escapes hide no slash, tilde or percent sign."""


def schema_parts(schema: dict[str, Any], *, param: str) -> list[dict[str, Any]]:
    """Return the schema and all schemas in it, each once; no values that only look like one, as in ``enum``.

    Raises InvalidRequest for a reference to anything but a place in ``schema``.
    """
    found, waiting, has_references = dict[int, dict[str, Any]](), list[object]([schema]), False
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict) or id(part) in found:
            continue
        found[id(part)] = part
        for name in _SCHEMAS_BY_NAME:
            if isinstance(part.get(name), dict):
                waiting += part[name].values()
        for name in _LISTS_OF_SCHEMAS:
            if isinstance(part.get(name), list):
                waiting += part[name]
        waiting += [part[name] for name in _SCHEMAS if name in part]
        if "$ref" in part:
            has_references = True
            waiting.append(target(schema, part["$ref"], param=param))
    if has_references and any(_has_address(part) for part in found.values() if part is not schema):
        raise _refusal("$id is supported only at the top of a schema with $ref", param)
    return list(found.values())


def target(root: dict[str, Any], reference: object, *, param: str) -> object:
    """Return what a ``$ref`` points to. Raises InvalidRequest where it is no place in ``root``."""
    refusal = _refusal(f"$ref: {str(reference)[:80]!r} is not # or #/ and a place in the schema", param)
    if not isinstance(reference, str) or not _POINTER.fullmatch(reference):
        raise refusal
    found: object = root
    for step in unquote(reference).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and re.fullmatch("[0-9]{1,5}", name) and int(name) < len(found):
            found = found[int(name)]
        else:
            raise refusal
        if isinstance(found, dict) and _has_address(found):
            raise _refusal("$id is supported only at the top of a schema with $ref", param)
    return found


def is_endless(root: dict[str, Any], parts: list[dict[str, Any]], *, param: str) -> bool:
    """Return whether a schema among ``parts`` needs itself, so that no value of finite length is valid under it.

    Takes time linear in the schema's length.
    """
    unmet, awaiting, ready = dict[int, int](), defaultdict[int, list[list[int]]](list), list[int]()
    for part in parts:
        needs = list(_needs(root, part, param))
        unmet[id(part)] = len(needs)
        ready += [] if needs else [id(part)]
        for ways in needs:
            need = [id(part)]  # Emptied once it is met.
            for way in ways:
                awaiting[id(way)].append(need)
    while ready:
        for need in awaiting[ready.pop()]:
            if need:
                owner = need.pop()
                unmet[owner] -= 1
                ready += [] if unmet[owner] else [owner]
    return any(unmet.values())


def _needs(root: dict[str, Any], part: Mapping[str, Any], param: str) -> Iterator[list[object]]:
    """Yield lists of schemas; one of each has to have a valid value if ``part`` has one."""
    ways = [[target(root, part["$ref"], param=param)]] if "$ref" in part else []
    ways += [[each] for each in _list(part, "allOf")] + [_list(part, name) for name in ("anyOf", "oneOf")]
    if part.get("type") in ("object", ["object"]) and isinstance(properties := part.get("properties"), dict):
        required = {name for name in _list(part, "required") if isinstance(name, str)}
        ways += [[each] for name, each in properties.items() if name in required]
    least = part.get("minItems")
    if part.get("type") in ("array", ["array"]) and isinstance(least, int | float) and 0 < least < math.inf:
        first = _list(part, "prefixItems") or _list(part, "items")
        ways += [[each] for each in first[: int(least)]]
        ways += [[part.get("items")]] if least > len(first) else []
    if "enum" not in part and "const" not in part:
        yield from (each for each in ways if each and all(isinstance(way, dict) for way in each))


def _has_address(part: Mapping[str, Any]) -> bool:
    return any(isinstance(part.get(name), str) for name in ("$id", "id"))


def _list(part: Mapping[str, Any], name: str) -> list[Any]:
    found = part.get(name)
    return found if isinstance(found, list) else []


def _refusal(what: str, param: str) -> InvalidRequest:
    return InvalidRequest(what, param=param, code="unsupported_schema")
