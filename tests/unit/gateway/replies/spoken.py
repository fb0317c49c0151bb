"""What readers make of a text, however it is cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from services.gateway.replies.formats import tool_format
from services.gateway.replies.parts import CallArguments, CallBegun, Reasoning, ReplyPart, ReplyReader, Text
from services.gateway.replies.tool_reader import ToolReader

SCHEMAS: dict[str, dict[str, Any]] = {
    "look": {
        "type": "object",
        "properties": {
            "at": {"type": "string"},
            "n": {"type": "integer"},
            "deep": {"type": "boolean"},
            "list": {"$ref": "#/$defs/list"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "any": {},
            "odd": {"type": None},
            "odder": {"type": [{"of": "string"}, "integer"]},
        },
        "$defs": {"list": {"type": "array"}},
    },
    "add.up": {"type": "object", "additionalProperties": {"type": "number"}},
}


def tool_reader(name: str) -> ToolReader:
    """A reader of the format of this name; call ids are ``id-0`` and so on."""
    found = tool_format(name, "")
    assert found is not None
    syntax = replace(found.syntax, joint="\n" if name in ("hermes", "qwen3_coder") else "")
    return ToolReader(syntax, schemas=SCHEMAS, new_id=lambda index: f"id-{index}")


def read(reader: ReplyReader, pieces: Iterable[str]) -> list[ReplyPart]:
    """Every part of an answer that comes in these pieces, neighbours of one kind joined."""
    parts = [part for piece in pieces for part in reader.feed(piece)] + reader.end()
    return joined(parts)


def joined(parts: Sequence[ReplyPart]) -> list[ReplyPart]:
    found: list[ReplyPart] = []
    for part in parts:
        match (found[-1] if found else None, part):
            case (Text(before), Text(text)):
                found[-1] = Text(before + text)
            case (Reasoning(before), Reasoning(text)):
                found[-1] = Reasoning(before + text)
            case (CallArguments(index, before), CallArguments(same, text)) if index == same:
                found[-1] = CallArguments(index, before + text)
            case _:
                found.append(part)
    return found


def every_split(make: Callable[[], ReplyReader], text: str) -> list[ReplyPart]:
    """The parts of ``text``, once it is certain that no cut of it in two, and no character alone, changes them."""
    whole = read(make(), [text])
    for place in range(1, len(text)):
        assert read(make(), [text[:place], text[place:]]) == whole, (text[:place], text[place:])
    assert read(make(), text) == whole
    return whole


def a_call(index: int, name: str, arguments: str) -> list[ReplyPart]:
    return [CallBegun(index, f"id-{index}", name), CallArguments(index, arguments)]
