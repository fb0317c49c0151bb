"""From a parameter's text to its JSON, by the tool's schema, for calls written as XML. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

JSON_TYPES: Final = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
STRING: Final = frozenset({"string"})

_MOST_STEPS: Final = 32
"""Limit on references and combinations followed into a schema; beyond it every type is allowed."""


def parameter_types(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """Return the JSON types that the parameter ``name`` of a tool with this ``schema`` may have."""
    return allowed_types(parameter_schema(schema, name), schema)


def parameter_schema(schema: Mapping[str, Any], name: str) -> object:
    """Return the schema of one parameter, or that of ``additionalProperties`` if it is not declared."""
    found = resolved(schema, schema)
    properties = found.get("properties") if isinstance(found, Mapping) else None
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return found.get("additionalProperties", True) if isinstance(found, Mapping) else True


def resolved(schema: object, root: Mapping[str, Any]) -> object:
    """Return the target of a local reference within ``root``, or the schema itself if it is no such reference.

    A reference without a target gives None; a chain that is too long gives True.
    """
    for _ in range(_MOST_STEPS):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#"):
            return schema
        schema = root
        for step in reference[1:].split("/")[1:]:
            schema = schema.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
    return True


def allowed_types(schema: object, root: Mapping[str, Any], steps: int = _MOST_STEPS) -> frozenset[str]:
    """Return the JSON types of values that may be valid under ``schema``, a part of ``root``."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or steps == 0:
        return JSON_TYPES
    types = JSON_TYPES
    declared = schema.get("type")
    told = declared if isinstance(declared, list) else [declared]
    # Nothing has checked a schema that binds no answer, and what is no type restricts nothing.
    if names := frozenset(name for name in told if isinstance(name, str)) & JSON_TYPES:
        types &= names | ({"integer"} if "number" in names else frozenset())
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        types &= frozenset().union(*(_types_of(json.dumps(value)) for value in values))
    for key in ("anyOf", "oneOf"):
        if branches := _list(schema, key):
            types &= frozenset().union(*(allowed_types(branch, root, steps - 1) for branch in branches))
    for branch in _list(schema, "allOf"):
        types &= allowed_types(branch, root, steps - 1)
    return types


def json_value(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a parameter that was written as ``text``.

    JSON of one of ``types`` is returned as written; Python's ``True`` and ``None`` are converted to JSON's spelling.
    Everything else becomes a string, even where the schema allows none: the tool sees what the model wrote.
    """
    if types == STRING:
        return json.dumps(text, ensure_ascii=False)
    said = text.strip()
    if "string" not in types:
        said = {"True": "true", "False": "false", "None": "null"}.get(said, said)
    if _is_json(said) and not said.startswith('"') and _types_of(said) & types:
        return said
    return json.dumps(text, ensure_ascii=False)


def is_inside_string(text: str) -> bool:
    """Return whether ``text``, the beginning of a JSON list or object, ends within one of its strings."""
    if not text.lstrip().startswith(("{", "[")):
        return False
    is_inside = is_escaped = False
    for character in text:
        if is_escaped:
            is_escaped = False
        elif character == "\\":
            is_escaped = is_inside
        elif character == '"':
            is_inside = not is_inside
    return is_inside


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _types_of(said: str) -> frozenset[str]:
    """Return the types of a JSON text."""
    names = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
    if (name := names.get(said[:1])) is not None:
        return frozenset({name})
    is_whole = said.lstrip("-").isdigit() or float(said).is_integer()
    return frozenset({"number", "integer"} if is_whole else {"number"})


def _list(schema: Mapping[str, Any], key: str) -> list[object]:
    found = schema.get(key)
    return found if isinstance(found, list) else []
