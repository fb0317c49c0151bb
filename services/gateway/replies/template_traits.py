"""What a chat template does with earlier tool calls, found by rendering some. Done once, when the gateway starts.

Templates differ in what they accept: arguments as JSON text, or as an object that they write themselves; ids of any
form, or of nine characters; and some recognise a message with calls by its null content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from services.gateway.verbatim import Verbatim

_SAID = '{"k":  "v"}'  # Two spaces, which no template would write.
_OBJECT = {"k": "v"}
_TEXT = "Let me see."
_LONG_ID, _SHORT_ID = "call_0123456789abcdef01234567", "Ab3dEf7hI"
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "probe",
        "parameters": {
            "type": "object",
            "properties": {"k": {"type": "string", "description": "k"}},
            "required": ["k"],
        },
    },
}

_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")

Render = Callable[..., str]
"""The type of ``Tokenizer.render``."""

ArgumentKind = Literal["text", "verbatim", "object"]


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """Traits of a chat template; the defaults are those of one that knows no tool calls.

    ``arguments``: it takes them as ``text`` and writes them unchanged; it writes JSON itself, so that the original text
    can replace it (``verbatim``); or it looks into the ``object``.
    """

    arguments: ArgumentKind = "object"
    needs_null_content: bool = False
    has_short_ids: bool = False
    takes_many_calls: bool = True
    joint: str = ""
    knows_developer: bool = False
    reasoning_fields: tuple[str, ...] = ()


NO_TRAITS = TemplateTraits()


def template_traits(render: Render, source: str) -> TemplateTraits:
    """Return the traits of a template, found by rendering; what it refuses it does not support."""
    has_short_ids = _rendered(render, _LONG_ID, _OBJECT) is None and _rendered(render, _SHORT_ID, _OBJECT) is not None
    call_id = _SHORT_ID if has_short_ids else _LONG_ID
    arguments = _argument_kind(render, call_id, "")
    # Some templates write calls only for a message whose content is null.
    needs_null = arguments == "object" and _argument_kind(render, call_id, None) != "object"
    if needs_null:
        arguments = _argument_kind(render, call_id, None)
    content = None if needs_null else ""
    given: Any = {"text": _SAID, "verbatim": Verbatim(_SAID), "object": _OBJECT}[arguments]
    one, two = (_rendered(render, call_id, given, content=content, calls=calls) for calls in (1, 2))
    return TemplateTraits(
        arguments=arguments,
        needs_null_content=needs_null,
        has_short_ids=has_short_ids,
        takes_many_calls=one is None or two is not None,
        joint=_joint(_rendered(render, call_id, given, content=_TEXT)),
        knows_developer="developer" in source,
        reasoning_fields=tuple(name for name in _REASONING_FIELDS if re.search(rf"\b{name}\b", source)),
    )


def _argument_kind(render: Render, call_id: str, content: str | None) -> ArgumentKind:
    as_text = _rendered(render, call_id, _SAID, content=content)
    if as_text is not None and _SAID in as_text:
        return "text"
    as_object = _rendered(render, call_id, _OBJECT, content=content)
    verbatim = _rendered(render, call_id, Verbatim(_SAID), content=content)
    if as_object is None or verbatim is None or _SAID not in verbatim:
        return "object"
    # A template that writes objects another way, such as indented, does not write the model's own text.
    return "verbatim" if verbatim.replace(_SAID, json.dumps(_OBJECT)) == as_object else "object"


def _joint(rendered: str | None) -> str:
    """Return the blanks between a message's text and its first call."""
    _, _, behind = (rendered or "").partition(_TEXT)
    return behind[: len(behind) - len(behind.lstrip())]


def _rendered(render: Render, call_id: str, arguments: Any, *, content: str | None = "", calls: int = 1) -> str | None:
    """Return a rendered conversation with a call and its result, or None where the template refuses it."""
    call = {"id": call_id, "type": "function", "function": {"name": "probe", "arguments": arguments}}
    result = {"role": "tool", "name": "probe", "tool_call_id": call_id, "content": "r"}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": content, "tool_calls": [call] * calls},
        *[result] * calls,
    ]
    try:
        return render(messages, tools=[_TOOL])
    except Exception:  # A template may raise anything; a later request that it fails for gets the error.
        return None
