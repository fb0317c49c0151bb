"""Grammars of arguments written as tagged texts, which guarantee that the arguments are valid when read.

Rules are in llguidance's dialect of Lark. A string stands as its own text, everything else as JSON. Declared parameters
come in their order; constraints of a schema that cannot be enforced on such texts are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from services.gateway.grammars.references import target
from services.gateway.grammars.requested import ANY_OBJECT
from services.gateway.grammars.schemas import check_schema, json_rule
from services.gateway.replies.parameter_types import STRING, allowed_types, json_value
from services.gateway.replies.tagged_scanner import PARAMETER, PARAMETER_END
from shared.errors import InvalidRequest

MAX_PARAMETERS: Final = 64
"""Limit on undeclared parameters of one call."""

MAX_REFERENCES: Final = 32
"""Limit on references that lead from one to the next."""

_NOTES: Final = frozenset(
    {"title", "description", "default", "examples", "deprecated", "$schema", "$id", "$comment", "x-guidance"}
)
_OF_ROOT: Final = _NOTES | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_OF_STRING: Final = _NOTES | {"type", "minLength", "maxLength", "pattern", "format"}
_LENGTHS: Final = frozenset({"minLength", "maxLength"})
_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
_FORMATS: Final = {
    "date": _DATE,  # Only days that every month has.
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
}
_END = r"\n<\/parameter>"
_ONCE = r" & ~/(?s:.*)<\/parameter>(?s:.+)/"  # A reader stops at the first end.


class TaggedArguments:
    """The rules of one tool's arguments, whose names all begin with ``name``."""

    def __init__(self, name: str, schema: Mapping[str, Any], *, param: str) -> None:
        """Make the rules. Raises InvalidRequest, which names ``param``, for a schema that cannot be enforced."""
        self.lines: list[str] = []
        self._name, self._param = name, param
        self._root: dict[str, Any] = {**ANY_OBJECT} if schema is ANY_OBJECT else check_schema(schema, param=param)
        if extra := sorted(self._root.keys() - _OF_ROOT):
            raise self._refusal(f"{extra[0]} of an object")
        declared = self._root.get("properties", {})
        required = list(self._root.get("required", []))
        extra_schema = self._root.get("additionalProperties", True)
        parts = [self._parameter(key, inner, key in required) for key, inner in declared.items()]
        parts += [self._parameter(key, extra_schema, True) for key in required if key not in declared]
        if not declared and extra_schema is not False:
            self.lines.append(f"{name.upper()}_KEY: /[^<>\\s]{{1,64}}/")
            parts.append(
                f'("{PARAMETER}" {name.upper()}_KEY ">\\n" {self._value(extra_schema)} "\\n"){{0,{MAX_PARAMETERS}}}'
            )
        self.lines.append(f"{name}: " + (" ".join(part for part in parts if part) or '""'))

    def _parameter(self, key: str, schema: object, is_required: bool) -> str:
        if schema is False:
            if is_required:
                raise self._refusal("a required parameter without a value")
            return ""
        if ">" in key or "\n" in key:
            raise self._refusal("a parameter with > in its name")
        head = json.dumps(f"{PARAMETER}{key}>\n", ensure_ascii=False)
        part = f'{head} {self._value(schema)} "\\n"'
        return part if is_required else f"({part})?"

    def _value(self, schema: object) -> str:
        """Return a rule of a parameter's text and its end."""
        schema = self._target(schema)
        if not isinstance(schema, Mapping):
            return self._text()
        while "allOf" in schema and len(schema["allOf"]) == 1 and schema.keys() - _NOTES == {"allOf"}:
            schema = self._target(schema["allOf"][0])
            if not isinstance(schema, Mapping):
                return self._text()
        types = allowed_types(schema, self._root)
        if "enum" in schema or "const" in schema:
            if len(beside := sorted(schema.keys() - _NOTES - {"type"})) > 1:
                raise self._refusal(f"{beside[0]} beside {beside[1]}")
            return self._one_of([schema["const"]] if "const" in schema else schema["enum"], types)
        if "string" not in types:
            return self._json(schema)
        if types == STRING:
            return self._string(schema)
        branches = schema.get("anyOf") or schema.get("oneOf")
        if branches and len(schema.keys() - _NOTES) == 1:
            return self._either([self._target(branch) for branch in branches])
        if schema.keys() - _NOTES - {"type"}:
            raise self._refusal("a parameter that may be a string or something else")
        return self._text()

    def _target(self, schema: object) -> object:
        """Return what a chain of references leads to. Raises InvalidRequest where one has more to say."""
        link = schema
        for _ in range(MAX_REFERENCES):
            if not isinstance(link, dict) or "$ref" not in link:
                return link
            if beside := sorted(link.keys() - _NOTES - {"$ref", "$defs", "definitions"}):
                raise self._refusal(f"{beside[0]} beside $ref")
            link = target(self._root, link["$ref"], param=self._param)
        raise self._refusal(f"a chain of more than {MAX_REFERENCES} references")

    def _either(self, branches: list[object]) -> str:
        """Return a rule for one of several schemas, some of them strings.

        Text that is read as another type must be valid as such.
        """
        for branch in branches:
            plain = isinstance(branch, Mapping) and not branch.keys() - _NOTES - {"type"}
            if not plain and allowed_types(branch, self._root) != STRING:
                raise self._refusal("a parameter that may be a string or something else")
        strings = [branch for branch in branches if allowed_types(branch, self._root) == STRING]
        if len(strings) < len(branches) and any(schema.keys() - _NOTES - {"type"} for schema in strings):  # type: ignore[attr-defined]
            others = {name for branch in branches for name in allowed_types(branch, self._root)} - STRING
            if others != {"null"}:
                raise self._refusal("a parameter that may be a string or something else")
            return f'("null{self._end}" | {" | ".join(map(self._value, strings))})'
        return f"({' | '.join(map(self._value, strings))})" if len(strings) == len(branches) else self._text()

    def _one_of(self, values: list[Any], types: frozenset[str]) -> str:
        ways = []
        for value in values:
            if isinstance(value, str) and "string" not in types:
                raise self._refusal("a value of another type")
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            if PARAMETER_END in text or json.loads(json_value(text, types)) != value:
                raise self._refusal("a value that its text does not tell from another")
            ways.append(json.dumps(f"{text}\n{PARAMETER_END}", ensure_ascii=False))
        return f"({' | '.join(ways)})"

    def _string(self, schema: Mapping[str, Any]) -> str:
        if unknown := sorted(schema.keys() - _OF_STRING):
            raise self._refusal(f"{unknown[0]} of a string")
        bounds = schema.keys() & (_LENGTHS | {"pattern", "format"})
        if not bounds:
            return self._text()
        terms = []
        if bounds & _LENGTHS:
            terms.append(f"(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})")
        if "pattern" in bounds:
            terms.append(self._pattern(schema["pattern"]))
        if "format" in bounds:
            if schema["format"] not in _FORMATS:
                raise self._refusal(f"format {schema['format']!r} of a string")
            terms.append(_FORMATS[schema["format"]])
        return self._lazy(" & ".join(f"/{term}{_END}/" for term in terms) + _ONCE)

    def _pattern(self, pattern: str) -> str:
        """Return a regular expression of whole texts that contain a match of ``pattern``."""
        body = pattern.removeprefix("^")
        begins = body != pattern
        ends = bool(re.search(r"(?<!\\)(?:\\\\)*\$$", body))
        body = body[:-1] if ends else body
        if (begins or ends) and _has_alternatives(body):
            raise self._refusal("a pattern with an anchor in one of its alternatives")
        body = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", body)
        return f"{'' if begins else '(?s:.*)'}(?:{body}){'' if ends else '(?s:.*)'}"

    def _json(self, schema: Mapping[str, Any]) -> str:
        known = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        keyword, _, text = json_rule(dict(schema) | known, param=self._param).partition(" ")
        rule = f"{self._name}_j{len(self.lines)}"
        self.lines.append(f"{rule}: {keyword} " + text.replace("%", "\\u0025"))
        return f'{rule} "{self._end}"'

    def _text(self) -> str:
        """Return a rule of any text up to its end."""
        return self._lazy(r"/(?s:.*)<\/parameter>/")

    def _lazy(self, terminal: str) -> str:
        number = len(self.lines)
        self.lines.append(f"{self._name.upper()}_T{number}: {terminal}")
        self.lines.append(f"{self._name}_t{number}[lazy]: {self._name.upper()}_T{number}")
        return f"{self._name}_t{number}"

    @property
    def _end(self) -> str:
        return f"\\n{PARAMETER_END}"

    def _refusal(self, what: str) -> InvalidRequest:
        return InvalidRequest(
            f"{what} cannot be enforced in this model's format of calls", param=self._param, code="unsupported_schema"
        )


def _has_alternatives(pattern: str) -> bool:
    """Return whether ``|`` stands outside of all groups and classes."""
    bare = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "", pattern)
    while (less := re.sub(r"\([^()]*\)", "", bare)) != bare:
        bare = less
    return "|" in bare
