"""From a request's fields to its grammar; only one field may ask for one. Pure, but long texts take time."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from llguidance.gbnf_to_lark import any_to_lark, is_lark_syntax

from services.gateway.grammars.schemas import json_schema_grammar, lark_with_kept_schemas
from services.gateway.openai_schema.sampling import SamplingFields, StructuredOutputs
from shared.errors import InvalidRequest
from shared.messages.requests import MAX_GRAMMAR_BYTES, Grammar

ANY_OBJECT: Final = {"type": "object"}

_NUMBERED: Final = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Asked:
    """The grammar that a field asks for; ``make`` may take milliseconds, and raises InvalidRequest."""

    param: str
    make: Callable[[], Grammar]


def asked_grammar(fields: SamplingFields, response_format: dict[str, Any] | None) -> Asked | None:
    """Return the grammar that the request's own fields ask for, or None where the answer may be any text.

    Raises InvalidRequest for fields that ask for two grammars or contradict one.
    """
    found = [*_of_response_format(response_format), *_of_structured_outputs(fields.structured_outputs)]
    found += _of(fields.guided_json, fields.guided_regex, fields.guided_choice, fields.guided_grammar, "guided_{}")
    if not found:
        return None
    if len(found) > 1:
        names = " and ".join(each.param for each in found)
        raise InvalidRequest(f"{names} exclude one another: an answer has one grammar", param=found[1].param)
    if fields.ignore_eos:
        raise InvalidRequest(f"ignore_eos and {found[0].param} exclude each other: a grammar ends", param="ignore_eos")
    return found[0]


def _of_response_format(response_format: dict[str, Any] | None) -> list[Asked]:
    if response_format is None:
        return []
    match response_format.get("type"):
        case "text":
            return []
        case "json_object":
            return [Asked("response_format", lambda: json_schema_grammar(ANY_OBJECT, param="response_format"))]
        case "json_schema":
            return [_of_json_schema(response_format.get("json_schema"))]
        case other:
            raise InvalidRequest(
                f"response_format of type {str(other)[:32]!r} is not supported: text, json_object and json_schema are",
                param="response_format.type",
                code="unsupported_parameter",
            )


def _of_json_schema(described: object) -> Asked:
    """Return the grammar of OpenAI's ``{"name", "schema", "strict", "description"}``.

    It holds whether strict or not.
    """
    if not isinstance(described, dict) or not isinstance(described.get("name"), str):
        raise InvalidRequest("response_format.json_schema needs a name", param="response_format.json_schema.name")
    if not isinstance(described.get("strict"), bool | None):
        raise InvalidRequest("strict must be true or false", param="response_format.json_schema.strict")
    param = "response_format.json_schema.schema"
    schema = described.get("schema", ANY_OBJECT)
    if not isinstance(schema, dict):
        raise InvalidRequest("a JSON schema must be an object", param=param)
    return Asked(param, lambda: json_schema_grammar(schema, param=param))


def _of_structured_outputs(given: StructuredOutputs | None) -> list[Asked]:
    if given is None:
        return []
    for name in ("structural_tag", "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"):
        if getattr(given, name) not in (None, False):
            raise InvalidRequest(
                f"structured_outputs.{name} is not supported",
                param=f"structured_outputs.{name}",
                code="unsupported_parameter",
            )
    found = _of(given.json, given.regex, given.choice, given.grammar, "structured_outputs.{}")
    if given.json_object:
        param = "structured_outputs.json_object"
        found.append(Asked(param, lambda: json_schema_grammar(ANY_OBJECT, param=param)))
    if not found:
        raise InvalidRequest(
            "structured_outputs needs one of json, regex, choice, grammar and json_object", param="structured_outputs"
        )
    return found


def _of(
    schema: dict[str, Any] | str | None,
    regex: str | None,
    choice: Sequence[str] | None,
    grammar: str | None,
    names: str,
) -> list[Asked]:
    found = []
    if schema is not None:
        found.append(Asked(names.format("json"), lambda: json_schema_grammar(schema, param=names.format("json"))))
    if regex is not None:
        found.append(Asked(names.format("regex"), lambda: Grammar(kind="regex", text=regex)))
    if choice is not None:
        found.append(Asked(names.format("choice"), lambda: choice_grammar(choice)))
    if grammar is not None:
        found.append(Asked(names.format("grammar"), lambda: written_grammar(grammar, param=names.format("grammar"))))
    return found


def choice_grammar(choices: Sequence[str]) -> Grammar:
    """Return a grammar that matches one of ``choices``."""
    return Grammar(kind="regex", text="|".join(f"(?:{_quoted(choice)})" for choice in choices))


def written_grammar(text: str, *, param: str) -> Grammar:
    """Return a grammar written in Lark's syntax, or in that of GBNF (``root ::= ...``), which is translated.

    Raises InvalidRequest for one that is too long, in neither syntax, or with a schema that cannot be enforced.
    """
    if len(text) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(f"a grammar may have at most {MAX_GRAMMAR_BYTES} bytes", param=param)
    try:
        lark: str = any_to_lark(text if is_lark_syntax(text) else _NUMBERED.sub(_character, text))
    except Exception as error:  # The translation raises plain Exceptions, and Python's own errors.
        raise InvalidRequest(f"the grammar is neither Lark nor GBNF: {str(error)[:400]}", param=param) from error
    return Grammar(kind="lark", text=lark_with_kept_schemas(lark, param=param))


def _character(escape: re.Match[str]) -> str:
    """Return a character of GBNF in place of its number; the translation loses the zeros of one with four or eight."""
    digits = escape[1] or escape[2]
    code = int(digits, 16) if digits else 0
    if not digits or 0xD800 <= code < 0xE000 or code > sys.maxunicode:
        return escape[0]
    return chr(code) if code >= 0x80 else f"\\x{code:02x}"


def _quoted(text: str) -> str:
    """Return a regular expression that matches only ``text``."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&~-]", r"\\\g<0>", text)
