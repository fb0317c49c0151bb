"""Values that a JSON schema of the API's own document takes, and values that it should not."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]

MOST_DEPTH = 8

_TEXTS = (
    "", "a", "hello there", "Once upon a time", "default", "user", "x" * 300, "\U0001f525\u0301\u202e\u0000", "\ufeff",
    "null", "<|im_start|>", "{{ messages }}", "../../etc/passwd", "a\r\nb: c", "\ud7ff\ue000", "é" * 40,
)  # fmt: skip

_WRONG: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**40, 0.5, -0.0, 1e308, "", "1",
    "true", [], {}, [[]], [None], {"": None}, "x" * 5000, [0] * 2000, {"a": {"b": [1, {"c": None}]}},
)  # fmt: skip


class SchemaValues:
    """Makes values by the document's components. ``hints`` are good values of fields by name: without them hardly any
    request would be served.
    """

    def __init__(self, components: Mapping[str, Schema], hints: Mapping[str, Sequence[Any]]) -> None:
        self._components = components
        self._hints = hints

    def valid(self, schema: Schema, chance: random.Random, *, name: str = "", depth: int = 0) -> Any:
        """A value that the schema takes."""
        if name in self._hints and chance.random() < 0.9:
            return chance.choice(self._hints[name])
        if "$ref" in schema:
            return self.valid(self._components[schema["$ref"].rpartition("/")[2]], chance, name=name, depth=depth)
        if "anyOf" in schema:
            return self.valid(chance.choice(schema["anyOf"]), chance, depth=depth)
        if "enum" in schema:
            return chance.choice(schema["enum"])
        if "const" in schema:
            return schema["const"]
        return self._of_type(schema.get("type", "any"), schema, chance, depth)

    def _of_type(self, kind: str, schema: Schema, chance: random.Random, depth: int) -> Any:
        if kind == "object":
            return self._object(schema, chance, depth)
        if kind == "array":
            most = min(schema.get("maxItems", 3), 3) if depth < MOST_DEPTH else 0
            count = chance.randint(schema.get("minItems", 0), max(most, schema.get("minItems", 0)))
            return [self.valid(schema.get("items", {}), chance, depth=depth + 1) for _ in range(count)]
        if kind == "string":
            text = chance.choice(_TEXTS)[: schema.get("maxLength", 5000)]
            return text.ljust(schema.get("minLength", 0), "-")
        if kind in ("integer", "number"):
            low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
            high = schema.get("maximum", schema.get("exclusiveMaximum", low + 2000))
            return chance.randint(low, high) if kind == "integer" else chance.uniform(low, high)
        if kind == "boolean":
            return chance.random() < 0.5
        return None if kind == "null" else chance.choice(_WRONG)

    def _object(self, schema: Schema, chance: random.Random, depth: int) -> dict[str, Any]:
        required = schema.get("required", ())
        share = chance.choice((0.0, 0.1, 0.1, 0.3)) if depth < MOST_DEPTH else 0.0
        made = {
            name: self.valid(of_field, chance, name=name, depth=depth + 1)
            for name, of_field in schema.get("properties", {}).items()
            if name in required or chance.random() < share
        }
        others = schema.get("additionalProperties")
        if isinstance(others, dict):
            keys = chance.sample(("0", "1", "17", "5000", "-1", "a"), chance.randrange(4))
            made |= {key: self.valid(others, chance, depth=depth + 1) for key in keys}
        return made

    def spoilt(self, value: Any, chance: random.Random) -> Any:
        """``value`` with something wrong somewhere, or at the edge."""
        if isinstance(value, dict) and value and chance.random() < 0.9:
            name = chance.choice(list(value))
            change = chance.randrange(10)
            if change == 0:
                return {other: each for other, each in value.items() if other != name}
            if change == 1:
                return value | {chance.choice(_TEXTS): chance.choice(_WRONG)}
            return value | {name: self.spoilt(value[name], chance)}
        if isinstance(value, list) and value and chance.random() < 0.6:
            at = chance.randrange(len(value))
            return [*value[:at], self.spoilt(value[at], chance), *value[at + 1 :]]
        if isinstance(value, int | float) and chance.random() < 0.5:
            return chance.choice((value + 1, value - 1, -value, value * 10**6, str(value)))
        return chance.choice(_WRONG)
