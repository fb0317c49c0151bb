"""The formats in which models write tool calls and reasoning, by name. A new one is one entry of a table."""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.replies.reasoning_reader import ReasoningSyntax
from services.gateway.replies.tagged_scanner import FUNCTION, FUNCTION_END
from services.gateway.replies.tool_reader import ARGUMENTS_MARKER, ToolSyntax


@dataclass(frozen=True, slots=True)
class CallShape:
    """The shape of calls in grammars: ``begin (before NAME middle ARGUMENTS after){between} end``."""

    before: str
    middle: str
    after: str
    between: str
    begin: str = ""
    end: str = ""
    list_when_many: bool = False  # Several calls stand in ``[...]``, a single one does not.
    name_is_json: bool = True


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of tool calls: the syntax to read, and the shape that a grammar enforces."""

    name: str
    syntax: ToolSyntax
    shape: CallShape


_HERMES = ToolFormat(
    "hermes",
    ToolSyntax(opener="<tool_call>", closer="</tool_call>"),
    CallShape(before='<tool_call>\n{"name": "', middle='", "arguments": ', after="}\n</tool_call>", between="\n"),
)
_LLAMA = ToolFormat(
    "llama3_json",
    ToolSyntax(opener="<|python_tag|>", is_bare=True, separators=";,"),
    CallShape(before='{"name": "', middle='", "parameters": ', after="}", between="; "),
)
_MISTRAL_SYNTAX = ToolSyntax(opener="[TOOL_CALLS]", has_lists=True, has_names=True)
_MISTRAL = ToolFormat(
    "mistral",
    _MISTRAL_SYNTAX,
    CallShape(begin="[TOOL_CALLS] [", before='{"name": "', middle='", "arguments": ', after="}", between=", ", end="]"),
)
_MISTRAL_NAMES = ToolFormat(
    "mistral",
    _MISTRAL_SYNTAX,
    CallShape(before="[TOOL_CALLS]", middle=ARGUMENTS_MARKER, after="", between="", name_is_json=False),
)
_JSON = ToolFormat(
    "json",
    ToolSyntax(is_bare=True, has_lists=True),
    CallShape(before='{"name": "', middle='", "arguments": ', after="}", between=", ", list_when_many=True),
)

_QWEN3_CODER = ToolFormat(
    "qwen3_coder",
    ToolSyntax(opener="<tool_call>", closer="</tool_call>", is_tagged=True),
    CallShape(
        before=f"<tool_call>\n{FUNCTION}", middle=">\n", after=f"{FUNCTION_END}\n</tool_call>", between="\n",
        name_is_json=False,
    ),
)  # fmt: skip

REASONING_PARSERS = ("auto", "think", "deepseek_r1", "none")
"""Values of ``--reasoning-parser``, besides two markers with a comma between them."""

THINK = ReasoningSyntax("<think>", "</think>")
BRACKETED = ReasoningSyntax("[THINK]", "[/THINK]")


def tool_format(name: str, template: str) -> ToolFormat | None:
    """Return the format of this name, or None for ``none``; ``auto`` is the one that the template's source shows."""
    if name == "auto":
        name = _shown_by(template)
    if name == "mistral":
        return _MISTRAL_NAMES if ARGUMENTS_MARKER in template else _MISTRAL
    return {"hermes": _HERMES, "qwen3_coder": _QWEN3_CODER, "llama3_json": _LLAMA, "json": _JSON}.get(name)


def reasoning_syntax(name: str, template: str) -> ReasoningSyntax | None:
    """Return the markers of this name, or None for ``none``; ``auto`` are those in the template's source."""
    if name == "auto":
        return next((known for known in (THINK, BRACKETED) if known.closer in template), None)
    if name == "think":
        return THINK
    if name == "deepseek_r1":
        return ReasoningSyntax("<think>", "</think>", always_opens=True)
    opener, comma, closer = name.partition(",")
    return ReasoningSyntax(opener, closer) if comma else None


def reasoning_fault(name: str) -> str:
    """Return what is wrong with a value of ``--reasoning-parser``, or ""."""
    opener, comma, closer = name.partition(",")
    if name in REASONING_PARSERS or (comma and opener.strip() and closer.strip()):
        return ""
    known = ", ".join(REASONING_PARSERS)
    return f"--reasoning-parser {name!r} must be one of {known}, or two markers with a comma between them"


def _shown_by(template: str) -> str:
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "qwen3_coder" if FUNCTION in template else "hermes"
    if "<|python_tag|>" in template or "ipython" in template:
        return "llama3_json"
    return "json"
