"""A bound on the patterns that one text must match at once.

Each further pattern multiplies llguidance's computation for a single step by four, which its limits do not see: ten
take 6 ms, fourteen 1.2 s and 300 MB.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Final

MAX_CONJUNCTS: Final = 8

_LENGTHS: Final = ("minLength", "maxLength")
_NOT_CODE: Final = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/')
_MERGED: Final = (
    "properties",
    "patternProperties",
    "additionalProperties",
    "items",
    "prefixItems",
    "pattern",
    "format",
)


def lark_conjuncts(text: str) -> int:
    """Return the number of ``&`` and ``~`` in a Lark grammar, outside of its strings and regular expressions."""
    code = _NOT_CODE.sub(" ", text)
    return code.count("&") + code.count("~")


def schema_conjuncts(schema: dict[str, Any], parts: Iterable[dict[str, Any]]) -> int:
    """Return a bound on the patterns, formats and lengths that apply to any one string.

    ``parts`` are all schemas in ``schema``, itself included. Schemas of one property are merged where ``allOf`` and its
    like name it twice; where they might be, all schemas with one name count together.
    """
    everything = list(parts)
    counted = _Counter(schema, everything)
    largest = max(map(counted.of, everything))
    if not any(merges(part) for part in everything):
        return largest
    by_name: dict[str, dict[str, int]] = defaultdict(dict)
    for part in everything:
        for name, inner in _named(part):
            by_name[name][json.dumps(inner)] = counted.of(inner)
    anywhere = sum(by_name.pop("*", {}).values())
    return max([largest, anywhere, *(anywhere + sum(each.values()) for each in by_name.values())])


class _Counter:
    """Counts the constraints that apply to one instance of a schema at once; a circular reference counts nothing."""

    def __init__(self, root: dict[str, Any], parts: list[dict[str, Any]]) -> None:
        self._root, self._all = root, sum(map(_own, parts))
        self._known: dict[int, int] = {}

    def of(self, schema: object) -> int:
        if not isinstance(schema, dict):
            return 0
        key = id(schema)
        if key not in self._known:
            self._known[key] = 0
            count = _own(schema) + sum(map(self.of, _list(schema, "allOf")))
            count += sum(max(map(self.of, _list(schema, name)), default=0) for name in ("anyOf", "oneOf"))
            self._known[key] = count + (self._referred(schema["$ref"]) if "$ref" in schema else 0)
        return self._known[key]

    def _referred(self, reference: object) -> int:
        if not isinstance(reference, str) or not reference.startswith("#"):
            return self._all
        target: Any = self._root
        for step in reference[1:].split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, dict) or name not in target:
                return self._all  # An anchor, or an escaped name: it may be any of them.
            target = target[name]
        return self.of(target) if reference in ("#", "") or "/" in reference else self._all


def _own(schema: Mapping[str, Any]) -> int:
    return ("pattern" in schema) + ("format" in schema) + any(name in schema for name in _LENGTHS)


def merges(schema: Mapping[str, Any]) -> bool:
    """Return whether several schemas apply to one instance here, which llguidance merges."""
    if len(_list(schema, "allOf")) > 1 or "patternProperties" in schema:
        return True
    sources = sum(name in schema for name in ("allOf", "anyOf", "oneOf", "$ref"))
    return sources > 1 or (sources == 1 and any(name in schema for name in _MERGED))


def _named(schema: Mapping[str, Any]) -> Iterable[tuple[str, object]]:
    properties = schema.get("properties")
    if isinstance(properties, dict):
        yield from ((f".{name}", inner) for name, inner in properties.items())
    patterns = schema.get("patternProperties")
    if isinstance(patterns, dict):
        yield from (("*", inner) for inner in patterns.values())
    yield from (("*", schema[name]) for name in ("additionalProperties",) if isinstance(schema.get(name), dict))
    yield from (("[]", inner) for inner in (schema.get("items"), *_list(schema, "prefixItems")) if inner is not None)


def _list(schema: Mapping[str, Any], name: str) -> list[object]:
    found = schema.get(name)
    return found if isinstance(found, list) else []
