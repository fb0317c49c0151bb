"""JSON schemas of the kinds that public suites are made of, drawn from a seed."""

from __future__ import annotations

import random
from typing import Any

PATTERNS = (
    "^[a-z]{2,4}$",
    "^[A-Z][a-z]?$",
    r"^\d{3}-\d{2}$",
    "^(yes|no|maybe)$",
    "[0-9]",
    r"^#[0-9a-f]{6}$",
    r"^v\d+\.\d+$",
    '^[^"]{1,3}$',
    r"^x[^-<>\\]?y$",
    r"^[^\w\s]$",
    r"^[\x00-\x21]{2}$",
    r"^a\x01?b\x1f$",
)
FORMATS = ("date", "date-time", "time", "ipv4", "uuid", "email")
WORDS = ("red", "light green", "Größe", 'quo"te', "a/b", "back\\slash", "日本", "", "bell\a", "line\n")


class SchemaDraw:
    """Draws one schema. ``depth`` bounds its nesting."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._definitions: dict[str, Any] = {}

    def schema(self) -> dict[str, Any]:
        drawn = self._object(3) if self._random.random() < 0.7 else self._any(3)
        if self._random.random() < 0.25:
            drawn = self._recursive()
        if self._definitions:
            drawn = {**drawn, "$defs": self._definitions}
        if self._random.random() < 0.3:
            drawn = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "drawn", **drawn}
        return drawn

    def _any(self, depth: int) -> dict[str, Any]:
        kinds = [self._string, self._number, self._enum, self._const, self._simple]
        if depth:
            kinds += [lambda: self._object(depth), lambda: self._array(depth), lambda: self._any_of(depth)]
            kinds += [lambda: self._reference(depth), lambda: self._all_of(depth)]
        return self._random.choice(kinds)()

    def _simple(self) -> dict[str, Any]:
        return {"type": self._random.choice(["boolean", "null", ["string", "null"], ["integer", "boolean"]])}

    def _string(self) -> dict[str, Any]:
        kind = self._random.randrange(4)
        if kind == 0:
            return {"type": "string", "pattern": self._random.choice(PATTERNS)}
        if kind == 1:
            return {"type": "string", "format": self._random.choice(FORMATS)}
        if kind == 2:
            least = self._random.randrange(4)
            return {"type": "string", "minLength": least, "maxLength": least + self._random.randrange(8)}
        return {"type": "string"}

    def _number(self) -> dict[str, Any]:
        drawn: dict[str, Any] = {"type": self._random.choice(["integer", "number"])}
        if self._random.random() < 0.7:
            low = self._random.randrange(-50, 50)
            drawn[self._random.choice(["minimum", "exclusiveMinimum"])] = low
            if self._random.random() < 0.6:
                apart = self._random.choice([0.5, 0.5, 1.25, self._random.randrange(2, 200)])
                apart = max(apart, 2) if drawn["type"] == "integer" else apart
                drawn[self._random.choice(["maximum", "exclusiveMaximum"])] = low + apart
        elif self._random.random() < 0.4:
            drawn = {"type": "integer", "multipleOf": self._random.choice([2, 5, 7, 10])}
        return drawn

    def _enum(self) -> dict[str, Any]:
        values: list[Any] = [*self._random.sample(WORDS, 3), 1, -2.5, None, True, ["x", 1], {"k": "v"}]
        return {"enum": self._random.sample(values, self._random.randrange(1, 5))}

    def _const(self) -> dict[str, Any]:
        return {"const": self._random.choice(["fixed", 17, None, {"a": [1, 2]}, [], False])}

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._random.sample(
            ["id", "name", "größe", "a b", "tags", "x/y", "kind", "value"], self._random.randrange(5)
        )
        drawn: dict[str, Any] = {"type": "object", "properties": {name: self._any(depth - 1) for name in names}}
        drawn["required"] = [name for name in names if self._random.random() < 0.6]
        extra = self._random.randrange(5)
        if extra < 2:
            drawn["additionalProperties"] = False
        elif extra == 2:
            drawn["additionalProperties"] = self._any(depth - 1)
        if self._random.random() < 0.15:
            drawn["patternProperties"] = {"^p[0-9]$": self._any(0)}
        if self._random.random() < 0.15:
            # llguidance can count further keys only where none of those that are named may be left out.
            drawn |= {"required": names, "maxProperties": len(names) + self._random.randrange(3)}
        return drawn

    def _array(self, depth: int) -> dict[str, Any]:
        drawn: dict[str, Any] = {"type": "array", "items": self._any(depth - 1)}
        if self._random.random() < 0.6:
            least = self._random.randrange(3)
            drawn |= {"minItems": least, "maxItems": least + self._random.randrange(3)}
        if self._random.random() < 0.2:
            drawn["prefixItems"] = [self._any(0) for _ in range(self._random.randrange(1, 3))]
            drawn["items"] = self._random.choice([False, self._any(0)])
            drawn.pop("minItems", None)
            drawn.pop("maxItems", None)
        return drawn

    def _any_of(self, depth: int) -> dict[str, Any]:
        if self._random.random() < 0.3:
            return {"oneOf": [{"type": "string", "maxLength": 5}, {"type": "integer"}, {"type": "null"}]}
        return {"anyOf": [self._any(depth - 1) for _ in range(self._random.randrange(2, 4))]}

    def _all_of(self, depth: int) -> dict[str, Any]:
        one, other = (
            {"type": "object", "properties": {name: self._any(depth - 1)}, "required": [name]} for name in "pq"
        )
        return {"allOf": [one, other]}

    def _reference(self, depth: int) -> dict[str, Any]:
        name = f"d{len(self._definitions)}"
        self._definitions[name] = {}
        self._definitions[name] = self._any(depth - 1)
        return {"$ref": f"#/$defs/{name}"}

    def _recursive(self) -> dict[str, Any]:
        """A tree or a list of its own kind."""
        value = self._any(1)
        if self._random.random() < 0.5:
            self._definitions["node"] = {
                "type": "object",
                "properties": {
                    "value": value,
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
                },
                "required": ["value"],
                "additionalProperties": False,
            }
        else:
            self._definitions["node"] = {
                "type": "object",
                "properties": {"value": value, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                "required": ["value", "next"],
            }
        return {"$ref": "#/$defs/node"}
